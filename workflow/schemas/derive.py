"""Write config.schema.json from the config classes: `make schema`. Editors complete from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "scripts"))

from finetune.config import Config  # noqa: E402


def schema() -> str:
    return json.dumps(Config.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    (HERE / "config.schema.json").write_text(schema())
