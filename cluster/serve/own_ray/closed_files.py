"""Keeps other users of this machine from the token and the sockets of the Ray that is started here.

Ray writes its token as the umask says, and opens the folder of each session to all users. A user without a home that
can be written, as in many containers, gets a token that stands in no file.
"""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

logger = logging.getLogger(__name__)

_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # where Ray looks before ~/.ray/auth_token


@contextmanager
def closed_to_other_users() -> Iterator[None]:
    """Close the token's folder while Ray is started meanwhile; afterwards the token and the folder of the session."""
    folder = Path.home() / ".ray"
    if os.environ.get("RAY_AUTH_MODE", "token") == "token" and not {*_TOKENS} & os.environ.keys():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder / "auth_token", os.R_OK) and not os.access(folder, os.W_OK):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray's processes inherit it
    _close(folder, 0o700)
    yield
    _close(folder / "auth_token", 0o600)
    node = ray._private.worker.global_worker.node
    _close(Path(node.get_session_dir_path()), 0o700)


def _close(path: Path, mode: int) -> None:
    try:
        path.chmod(mode)
    except (FileNotFoundError, NotADirectoryError):  # it was not written: Ray asks for no token, or no file has it
        pass
    except OSError as error:
        logger.warning("other users of this machine may reach %s: %s", path, error)
