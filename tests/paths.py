"""Where test data lives: the shared folder beside the checkout, or ``ZINC_RT_TEST_DATA``."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("ZINC_RT_TEST_DATA", ROOT.parent / "shared"))
VOCAB = SHARED / "vocab"
CHAT_TEMPLATES = SHARED / "chat_templates"
