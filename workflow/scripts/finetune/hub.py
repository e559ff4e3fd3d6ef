"""The Hugging Face hub: one clear line for each way in which it says no."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.cli import UserError
from finetune.dequantizing import refuse_quantized

MODEL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
SECOND_COPIES = ["consolidated*", "original/*"]
"""The same weights again, in the format of the model's authors."""


def download_model(source: str, revision: str | None, with_code: bool) -> tuple[Path, str]:
    """Snapshot of a hub model in the Hugging Face cache, and the commit it is."""
    from huggingface_hub import snapshot_download

    files = MODEL_FILES + (["*.py"] if with_code else [])
    wanted = {"revision": revision, "ignore_patterns": SECOND_COPIES}
    check_cache()
    with hub_errors("model", source, revision):
        refuse_quantized(Path(snapshot_download(source, allow_patterns=["config.json"], **wanted)))
        folder = Path(snapshot_download(source, allow_patterns=files, **wanted))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(source, allow_patterns=[*files, "*.bin"], **wanted)
    return folder, folder.name  # the cache names a snapshot after its commit


def check_cache() -> None:
    """On a cluster the home folder is often small, or read-only, or unknown to compute nodes."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not is_offline_mode() and not os.access(nearest, os.W_OK):
        raise UserError(
            f"the Hugging Face cache {cache} cannot be written. Set HF_HOME to a folder that can, "
            "and that compute nodes see: models are linked from there."
        )


@contextmanager
def hub_errors(kind: str, source: str, revision: str | None) -> Iterator[None]:
    """Turn the hub's exceptions into a UserError that says what to do."""
    from huggingface_hub import errors, is_offline_mode

    try:
        yield
    except errors.HFValidationError as error:
        raise UserError(f"{source!r} is no id that the hub could have: {error}") from None
    except errors.GatedRepoError:
        page = "https://huggingface.co/" + "datasets/" * (kind == "dataset") + source
        raise UserError(
            f"{source} is gated. Accept its licence at {page}, "
            "then run `hf auth login` on this machine."
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f"the {kind} {source} has no revision {revision!r}. Leave `revision` out "
            "for the newest."
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"the hub has no {kind} {source!r} that you may read. Check the spelling; for a "
            "private one run `hf auth login`; for a local folder write ./ before it."
        ) from None
    except errors.HfHubHTTPError as error:
        raise UserError(f"the hub refused the {kind} {source}: {error}") from None
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        why = "HF_HUB_OFFLINE is set" if is_offline_mode() else "the hub cannot be reached"
        raise UserError(
            f"the {kind} {source} is not in the Hugging Face cache, and {why} "
            f"({type(error).__name__}). Fetch it on a host with a network, or give a local "
            "path as `source`."
        ) from None
