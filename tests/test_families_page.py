"""The page of families says what the sweep found, in plain words."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "campaign"))
from families_page import BATCHES, REASONS, TEXTS, page, reason_of  # noqa: E402

CHUNKED = (
    "llama4 mixes tokens outside of plain attention (layer_types has 'chunked_attention'), where each rank would …"
)
OWN_LOSS = "BertForMaskedLM computes its loss in its own way, which does not add up over the ranks (expected …)"
PADDING = "WhisperForCausalLM counts padding as positions, because its forward takes no position_ids, and …; generate …"
POOLED = "BertModel returns pooler_output, which it computes from all tokens or from one (a pooled output); …"


def refused(why: str, *batches: str) -> dict[str, Any]:
    said = {
        batch: ["refused", why] if not batches or batch in batches else ["right", "output: 1e-7"]
        for batch in (*BATCHES, *TEXTS)
    }
    misuse = {"generate from shards": ["refused", "UsageError: ranks were called with different arguments"]}
    return {"verdict": "right" if batches else "refused", "batches": said | misuse}


RESULTS: list[Any] = [
    ("bert", "encoder", "BertModel", refused(POOLED)),
    ("bert", "masked", "BertForMaskedLM", refused(OWN_LOSS, "plain")),
    ("gemma3n", "causal", "Gemma3nForCausalLM", {"verdict": "not built", "why": "ValueError: no `timm`\nmore"}),
    ("gemma3", "causal", "Gemma3ForCausalLM", refused("", "none")),
    ("llama", "causal", "LlamaForCausalLM", refused("", "none")),
    ("llama4", "causal", "Llama4ForCausalLM", refused(CHUNKED)),
    ("whisper", "causal", "WhisperForCausalLM", refused(PADDING, "generate padded", "generate beams")),
    ("llama4_text", "causal", "Llama4ForCausalLM", refused(CHUNKED)),
]


def test_the_page_of_some_results_is_what_it_was(golden: Callable[[str, str], None]) -> None:
    """Right, refused and untried types of a family; classes where others of their type are right; exceptions."""
    text = page(RESULTS, version="5.0", command="make families")
    golden("families-page.md", text)
    assert "different arguments" not in text, "a misuse is not a reason"


def rows(text: str, heading: str) -> dict[str, list[str]]:
    """The cells of each row of the table below a heading, by the first."""
    below = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in below.splitlines() if line[:2] == "| "]
    return {first: others for first, *others in cells}


def test_a_reason_nobody_foresaw_is_shown_as_it_was_said() -> None:
    assert reason_of("… does something new").name == "… does something new"


# The page in the repository


STORED = (ROOT / "docs" / "transformers-families.md").read_text()


def test_every_reason_of_the_stored_page_is_in_plain_words() -> None:
    stored = set(rows(STORED, "Why some are refused")) - {"reason", "---"}
    assert stored <= {reason.name for reason in REASONS}


def test_the_counts_of_the_stored_page_are_those_of_its_lists() -> None:
    head, *sections = STORED.split("\n## ")
    for section in sections[2:]:
        verdict = section.partition("\n")[0].lower()
        lists = [" ".join(part.split()) for part in re.findall(r":\*\*(.*?)(?=\n\n|\Z)", section, flags=re.DOTALL)]
        assert f" {len({name for listed in lists for name in listed.split(', ')})} {verdict}" in head
