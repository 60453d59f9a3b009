"""Models by their id on the Hugging Face hub or a mirror of it: `org/name` -> a folder.

The library keeps them in its own cache and honours HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import AssetError, FileError, MissingExtraError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "*.jinja"]
# Folders hold other formats of the same weights; Mistral's repositories repeat them in one file.
_UNWANTED = ["*/*", "consolidated*"]


def resolve(name: str) -> Path:
    """The folder of the model's newest files, downloaded as far as they are not in the cache.

    Raises FileError for what is no id, AssetError for a model that is not there, not allowed or
    not to be reached, MissingExtraError without huggingface_hub.
    """
    if not _ID.fullmatch(name):
        raise FileError(f"{name} is neither there nor the id of a model on the hub, org/name")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        raise MissingExtraError("huggingface_hub", "hub") from None
    try:
        folder = snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    except GatedRepoError as error:
        raise AssetError(
            f"{name} is gated: accept its terms on its page, then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise AssetError(
            f"{name} is neither a folder here nor a model on the hub that one may see without "
            "`hf auth login`"
        ) from error
    except Exception as error:  # the library and its HTTP client raise all kinds
        reason = re.split(r"\. |\n", str(error) or type(error).__name__)[0].rstrip(".")
        raise AssetError(
            f"{name} is no folder here and cannot be fetched ({reason}); set HF_ENDPOINT to a "
            "mirror that can be reached, or take smollm2-135m (`gpt2llama fetch smollm2-135m`)"
        ) from error
    return Path(folder)
