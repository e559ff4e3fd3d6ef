"""Write config.schema.json from the config classes: `make schema`. Editors complete from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "scripts"))

from pydantic import Field  # noqa: E402

from finetune.config import Config, Name, RunDefaults  # noqa: E402


class File(Config):
    """The whole file, as it is written: a run leaves to `defaults` what it likes."""

    runs: dict[Name, RunDefaults] = Field(min_length=1)


def schema() -> str:
    return json.dumps(File.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    (HERE / "config.schema.json").write_text(schema())
