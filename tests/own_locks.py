"""Progress bars of processes that are forked from one which imports this file lock among their own threads alone.

The lock of tqdm is one between processes, too. It is a semaphore that a process leaves in /dev/shm when it is killed.
"""

import threading

from tqdm import tqdm

tqdm.set_lock(threading.RLock())
