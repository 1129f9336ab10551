"""Which application a folder of batches belongs to: another one would run its batches with other models.

All ingresses of an application hold a shared lock of one file, which names the application. A lock ends with its
process, also by SIGKILL, so that a name in the file counts only while a process holds the lock.
"""

import fcntl
import json
import time
from pathlib import Path
from typing import IO, NamedTuple

_FILE = ".application"
_TRIES = 50  # while another process writes its name into the file, or ends
_WAIT_S = 0.1


class Claimant(NamedTuple):
    """The application that an ingress belongs to. `cluster`: the address of its Ray cluster, on the machine `host`."""

    application: str
    host: str
    cluster: str

    def is_other(self, holder: "Claimant") -> bool:
        """Return whether the holder is another application. During an upgrade, two clusters may run the same one."""
        is_beside = self.host == holder.host and self.cluster != holder.cluster
        return self.application != holder.application or is_beside


def claim(root: Path, claimant: Claimant) -> IO[str]:
    """Return the open file whose lock claims a folder of batches for an application until the file is closed.

    Raises ValueError if a process of another application holds the folder.
    """
    file = (root / _FILE).open("a+")
    try:
        for _ in range(_TRIES):
            if _is_held(file, claimant):
                return file
            time.sleep(_WAIT_S)
        raise ValueError(f"http.batch_folder: {root} is locked, and its file {_FILE} names no application")
    except BaseException:
        file.close()
        raise


def _is_held(file: IO[str], claimant: Claimant) -> bool:
    """Take the lock. Returns whether it could be taken now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:  # no process has the folder
        file.truncate(0)
        file.write(json.dumps(claimant))
        file.flush()
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # another process writes its name
        return False
    file.seek(0)
    try:
        holder = Claimant(*json.loads(file.read()))
    except (ValueError, TypeError):
        return False
    if claimant.is_other(holder):
        name = f"application {holder.application!r} on {holder.host} (Ray at {holder.cluster})"
        reason = f"{Path(file.name).parent} belongs to the {name}, which runs"
        raise ValueError(f"http.batch_folder: {reason}. Give each application a folder of its own.")
    return True
