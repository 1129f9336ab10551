"""Keeps other users of this machine from the token and the sockets of the Ray that is started here.

Ray writes its token as the umask says, and opens the folder of each session to all users.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

logger = logging.getLogger(__name__)


@contextmanager
def closed_to_other_users() -> Iterator[None]:
    """Close the token's folder while Ray is started meanwhile; afterwards the token and the folder of the session."""
    folder = Path.home() / ".ray"
    if os.environ.get("RAY_AUTH_MODE", "token") == "token":
        with suppress(OSError):  # Ray tells of it
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _close(folder, 0o700)
    yield
    _close(folder / "auth_token", 0o600)
    node = ray._private.worker.global_worker.node
    _close(Path(node.get_session_dir_path()), 0o700)


def _close(path: Path, mode: int) -> None:
    try:
        path.chmod(mode)
    except FileNotFoundError:  # it was not written: Ray asks for no token
        pass
    except OSError as error:
        logger.warning("other users of this machine may reach %s: %s", path, error)
