"""The variables of a run of tests, and where it writes: a temporary home and a temporary cache directory.

torch, transformers and Ray read the variables once, when they are imported: import this module before.

The converted default model and the compiled CPU kernels take 40 s to make, and depend on the checkout alone. Runs share
them in .cache/tests of the checkout. Copies that the user's own cache directory has are linked from there.
"""

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.limits import FOLDERS

RUN = "CROSSDOCK_TESTS_CACHE"  # names the cache directory that several processes of one run share
SHARED = Path(__file__).parents[1] / ".cache" / "tests"
# of this run, and of libraries that have a cache of their own
_UNCHECKED = (".cache/crossdock-tests", ".cache/fontconfig", ".cache/dconf", ".triton")

os.environ.update(
    HF_HUB_OFFLINE="1",
    USE_HUB_KERNELS="0",
    TOKENIZERS_PARALLELISM="false",
    OMP_WAIT_POLICY="PASSIVE",  # spinning threads of several engines on few cores starve each other
    OMP_NUM_THREADS="1",  # two for a tiny model take a tenth more CPU time, and wait for each other on few cores
    RAY_USAGE_STATS_ENABLED="0",
    RAY_AUTH_MODE="disabled",  # else ray.init writes a token into the home directory
    RAY_worker_niceness="0",
    RAY_worker_register_timeout_seconds="300",  # as in a server's Ray; this one and the next: a machine may be slow
    RAY_gcs_server_port_wait_time_s="120",
    RAY_SERVE_CONTROL_LOOP_INTERVAL_S="0.1",
    SSL_CERT_DIR="/var/empty",  # no test speaks TLS; to read all certificates takes each client of httpx 25 ms
)
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # its kernels run on numpy
os.environ.pop("RAY_ADDRESS", None)  # tests never join a cluster
os.environ.pop("SSL_CERT_FILE", None)  # else SSL_CERT_DIR means nothing


def make_own_folders() -> Path:
    """Set HOME and CROSSDOCK_CACHE to new folders, for this process and its children. Return the new home."""
    user_home = Path.home()
    user_cache = Path(os.environ.get("CROSSDOCK_CACHE") or _xdg(user_home) / "crossdock")
    home = Path(tempfile.mkdtemp(prefix="crossdock-tests-"))
    FOLDERS.append(str(home))
    cache = Path(os.environ.get(RUN) or home / ".cache" / "crossdock-tests")
    (cache / "kernels").mkdir(parents=True, exist_ok=True)
    (SHARED / "models").mkdir(parents=True, exist_ok=True)
    (SHARED / "kernels").mkdir(exist_ok=True)
    for kind in ("models/*", "kernels/*.so"):
        _link(user_cache.glob(kind), SHARED / kind.split("/")[0])
    with contextlib.suppress(FileExistsError):
        (cache / "models").symlink_to(SHARED / "models")
    for kernel in (SHARED / "kernels").glob("*.so"):
        _copy(kernel, cache / "kernels")  # a link to a compiled kernel is not loaded
    if (settings := user_home / ".gitconfig").exists():
        os.environ.setdefault("GIT_CONFIG_GLOBAL", str(settings))  # says that the checkout is safe to read
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        os.environ.pop(name, None)
    os.environ.update(HOME=str(home), CROSSDOCK_CACHE=str(cache))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


def written_home(home: Path) -> list[str]:
    """Return the files that tests wrote into the home directory: in a user's run they would stay there."""
    files = (str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
    return sorted(name for name in files if not name.startswith(_UNCHECKED))


def share_kernels() -> None:
    """Copy the kernels that this run compiled to where the next run finds them."""
    for kernel in Path(os.environ["CROSSDOCK_CACHE"], "kernels").glob("*.so"):
        _copy(kernel, SHARED / "kernels")


def _copy(file: Path, folder: Path) -> None:
    """Copy a file that the folder lacks. Other processes may copy the file meanwhile."""
    if not (target := folder / file.name).exists():
        partial = folder / f"{file.name}.{os.getpid()}"
        shutil.copy2(file, partial)
        partial.rename(target)


def _xdg(home: Path) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")


def _link(paths: Iterable[Path], folder: Path) -> None:
    for old in folder.iterdir():
        if not old.exists():
            old.unlink(missing_ok=True)  # the user has removed its target
    for path in paths:
        with contextlib.suppress(FileExistsError):
            (folder / path.name).symlink_to(path.resolve())
