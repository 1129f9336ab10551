"""Kits with the packages that a GPU machine without a network lacks: made from wheels here, unpacked there.

    make gpu-kit                       # .gpu-kit/NAME.tar.xz, for each NAME of benchmarks/gpu-kits

A kit lies unpacked in the cache folder for later calls on the same machine, which then need not carry it again.

Imports the standard library alone: it runs before anything is unpacked.
"""

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

SUFFIX = ".tar.xz"
_LEFT_OUT = (
    *("nixl_ep_", "libucx_perftest"),  # extensions for other torch versions, and UCX's own benchmark: 100 MB
    *("ray/jars/", "ray/dashboard/client/", "ray/rllib/", "ray/data/", "ray/train/", "ray/tune/", "ray/cpp/"),
)
MOST_MIB = 56


def pack(wheels: Path, kit: Path, name: str = "truth") -> Path:
    """Write the content of all wheels into one archive, the kit `name`. Returns its path.

    Raises:
        ValueError: a wheel has files that only an installer can place, or the archive is too large.
    """
    kit.mkdir(parents=True, exist_ok=True)
    archive = kit / f"{name}{SUFFIX}"
    with tempfile.TemporaryDirectory() as folder:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as content:
                names = [name for name in content.namelist() if not any(part in name for part in _LEFT_OUT)]
                if placed := [name for name in names if ".data/purelib/" in name or ".data/platlib/" in name]:
                    raise ValueError(f"{wheel.name} has {placed[0]}, which must be installed by pip")
                content.extractall(folder, names)
                for each in names:  # a wheel says which files are programs; zipfile does not apply this
                    if content.getinfo(each).external_attr >> 16 & 0o111:
                        (Path(folder) / each).chmod(0o755)
        with tarfile.open(archive, "w:xz", preset=6) as output:
            for path in sorted(Path(folder).iterdir()):
                output.add(path, path.name)
    if archive.stat().st_size > MOST_MIB << 20:
        raise ValueError(f"{archive} has {archive.stat().st_size / 2**20:.1f} MiB, more than {MOST_MIB}")
    return archive


def unpack(kit: Path, sites: Path) -> None:
    """Unpack each archive of the folder `kit` into a folder of its name below `sites`, unless that has its content."""
    archives = sorted(kit.glob(f"*{SUFFIX}"))
    if not archives:
        raise SystemExit(f"--kit {kit}: there is no file *{SUFFIX}; `make gpu-kit` writes them")
    for archive in archives:
        site = sites / archive.name.removesuffix(SUFFIX)
        digest, mark = hashlib.sha256(archive.read_bytes()).hexdigest(), site / ".kit"
        if not (mark.exists() and mark.read_text() == digest):
            shutil.rmtree(site, ignore_errors=True)
            with tarfile.open(archive) as content:
                content.extractall(site, filter="data")
            mark.write_text(digest)


def environment(root: Path, cache: Path, kit: Path | None, is_dry: bool) -> dict[str, str]:
    """Return the environment in which the checkout at `root` is the package crossdock, beside those of the kit.

    Compiled kernels are kept below `cache`, for the next call on the same machine.
    """
    link = cache / "import" / "crossdock"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(root, target_is_directory=True)
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    installed = link.parent / "crossdock.dist-info"  # servers read their version there
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: crossdock\nVersion: {version}\n")
    paths = [str(link.parent)]
    if kit is not None:
        unpack(kit, cache / "site")
        paths += sorted(str(site.parent) for site in (cache / "site").glob("*/.kit"))  # those of earlier calls, too
    if existing := os.environ.get("PYTHONPATH"):
        paths.append(existing)
    values = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "USE_HUB_KERNELS": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "CROSSDOCK_CACHE": str(cache / "crossdock"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    if is_dry:
        values |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **values}


if __name__ == "__main__":
    written = pack(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    print(f"{written}: {written.stat().st_size / 2**20:.1f} MiB")
