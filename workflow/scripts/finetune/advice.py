"""What to change when memory does not suffice."""

from __future__ import annotations


def cheaper(settings: dict, parts: dict[str, int]) -> str:
    """What lowers the largest parts, cheapest first."""
    advice = []
    if settings["batch"]["micro"] > 1:
        advice.append("`batch: {micro: 1}` (the result stays the same)")
    recompute, others = remedies(settings)
    advice = recompute + advice + others
    largest = max(parts, key=parts.get)
    if largest in ("activations", "logits") or not advice:
        advice.append("a shorter max_length")
    return f"The largest part is {largest}. Try: {', '.join(advice)}."


def last_remedies(settings: dict) -> str:
    """What is left when one row at a time is too much."""
    recompute, others = remedies(settings)
    return f"Try, in this order: {', '.join([*recompute, 'a shorter max_length', *others])}."


def remedies(settings: dict) -> tuple[list[str], list[str]]:
    """Whether to recompute activations; then other methods and launch kinds."""
    recompute = [] if settings["gradient_checkpointing"] else ["`gradient_checkpointing: true`"]
    if settings["task"] == "sequence-classification":  # DDP and 16 bit are all there is
        return recompute, ["`method: lora`"] if settings["method"] == "full" else []
    if settings["method"] == "full":
        more = {"zero3": ["`launch: zero3-offload`"], "zero3-offload": []}
        spread = more.get(settings["launch"], ["`launch: zero3`"])
        return recompute, [*spread, "more gpus", "`method: qlora`"]
    others = []
    if settings["method"] == "lora":
        if settings["gpus"] > 1 and not settings["launch"].startswith("zero3"):
            others.append("`launch: zero3`")
        others.append("`method: qlora`")
    return recompute, others
