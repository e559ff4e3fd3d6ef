"""The hub: each way in which it says no becomes one line that says what to do."""

from types import SimpleNamespace

import pytest
from huggingface_hub import errors

from finetune.cli import UserError
from finetune.hub import MODEL_FILES, download_model, hub_errors
from finetune.places import load_hub

ANSWER = SimpleNamespace(headers={}, request=None)
"""What the HTTP errors want to hold."""

CACHE = (
    "the model org/name is not in the Hugging Face cache, and {} ({}). Fetch it on a host with a "
    "network, or give a local path as `source`."
)
CONFIG = ["config.json"]
OFFLINE = "HF_HUB_OFFLINE is set"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            errors.GatedRepoError("403", response=ANSWER),
            "org/name is gated. Accept its licence at https://huggingface.co/org/name, then run "
            "`hf auth login` on this machine.",
        ),
        (
            errors.RepositoryNotFoundError("404", response=ANSWER),
            "the hub has no model 'org/name' that you may read. Check the spelling; for a private "
            "one run `hf auth login`; for a local folder write ./ before it.",
        ),
        (
            errors.RevisionNotFoundError("404", response=ANSWER),
            "the model org/name has no revision 'v9'. Leave `revision` out for the newest.",
        ),
        (
            errors.DisabledRepoError("403 disabled", response=ANSWER),
            "the hub refused the model org/name: 403 disabled",
        ),
        (
            errors.HfHubHTTPError("500 Server Error", response=ANSWER),
            "the hub refused the model org/name: 500 Server Error",
        ),
        (
            errors.HFValidationError("Cannot have -- or .. in repo_id: 'org/name'."),
            "'org/name' is no id that the hub could have: Cannot have -- or .. in repo_id: "
            "'org/name'.",
        ),
        (
            errors.LocalEntryNotFoundError("no file"),
            CACHE.format(OFFLINE, "LocalEntryNotFoundError"),
        ),
        (errors.OfflineModeIsEnabled("no"), CACHE.format(OFFLINE, "OfflineModeIsEnabled")),
        (ConnectionError("no route"), CACHE.format(OFFLINE, "ConnectionError")),
    ],
    ids=lambda x: type(x).__name__,
)
def test_each_error_has_its_line(error, text) -> None:
    with pytest.raises(UserError) as caught, hub_errors("model", "org/name", "v9"):
        raise error
    assert str(caught.value) == text
    assert caught.value.__suppress_context__


def test_licence_of_a_dataset_is_on_its_own_page() -> None:
    with pytest.raises(UserError) as caught, hub_errors("dataset", "org/name", None):
        raise errors.GatedRepoError("403", response=ANSWER)
    assert " at https://huggingface.co/datasets/org/name, then" in str(caught.value)


def test_without_the_variable_the_network_is_to_blame(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UserError) as caught, hub_errors("model", "org/name", None):
        raise ConnectionError
    assert str(caught.value) == CACHE.format("the hub cannot be reached", "ConnectionError")


def test_errors_of_the_program_pass_unchanged() -> None:
    with pytest.raises(KeyError), hub_errors("model", "org/name", None):
        raise KeyError


def test_model_that_is_not_in_the_cache_for_real(tmp_path, monkeypatch) -> None:
    """No fake: huggingface_hub itself, with the HF_HUB_OFFLINE that every test runs under."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError) as caught:
        download_model("org/name", None, with_code=False)
    assert str(caught.value) == CACHE.format(OFFLINE, "LocalEntryNotFoundError")


def test_dataset_that_is_not_in_the_cache_for_real(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError) as caught:
        load_hub({"path": "org/name", "subset": None, "revision": None})
    text = CACHE.replace("the model", "the dataset")
    assert str(caught.value) == text.format(OFFLINE, "ConnectionError")


@pytest.mark.parametrize("source", ["org/na..me", "org/-name"])
def test_id_that_the_hub_could_not_have_for_real(source) -> None:
    with pytest.raises(UserError, match="is no id that the hub could have: "):
        download_model(source, None, with_code=False)


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """What snapshot_download was asked for, in place of the download."""
    asked = []

    def snapshot_download(source, revision, allow_patterns, ignore_patterns):
        assert ignore_patterns == ["consolidated*", "original/*"]
        asked.append((source, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def test_safetensors_are_fetched_and_no_code(downloads, tmp_path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert download_model("org/name", "v1", with_code=False) == (tmp_path, tmp_path.name)
    assert downloads == [("org/name", "v1", CONFIG), ("org/name", "v1", MODEL_FILES)]
    assert not any("py" in pattern or "bin" in pattern for pattern in MODEL_FILES)


def test_code_comes_along_where_it_is_trusted(downloads, tmp_path) -> None:
    (tmp_path / "model.safetensors").touch()
    download_model("org/name", None, with_code=True)
    assert downloads[1:] == [("org/name", None, [*MODEL_FILES, "*.py"])]


def test_bin_weights_are_fetched_only_where_there_are_no_safetensors(downloads) -> None:
    download_model("org/name", None, with_code=False)
    wanted = [CONFIG, MODEL_FILES, [*MODEL_FILES, "*.bin"]]
    assert [patterns for *_, patterns in downloads] == wanted


def test_a_quantized_model_is_refused_before_its_weights_come(downloads, tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(UserError, match=r"already quantized \(gptq\)"):
        download_model("org/name", None, with_code=False)
    assert downloads == [("org/name", None, CONFIG)]
