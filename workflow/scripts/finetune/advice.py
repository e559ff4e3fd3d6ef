"""What to change when memory does not suffice."""

from __future__ import annotations


def cheaper(settings: dict, parts: dict[str, int]) -> str:
    """What lowers the largest parts, cheapest first."""
    advice = []
    if not settings["gradient_checkpointing"]:
        advice.append("`gradient_checkpointing: true`")
    if settings["batch"]["micro"] > 1:
        advice.append("`batch: {micro: 1}` (the result stays the same)")
    if settings["task"] == "sequence-classification":  # DDP and 16 bit are all there is
        advice += ["`method: lora`"] if settings["method"] == "full" else []
    elif settings["method"] == "full":
        more = {"zero3": ["`launch: zero3-offload`"], "zero3-offload": []}
        advice += more.get(settings["launch"], ["`launch: zero3`"])
        advice += ["more gpus", "`method: qlora`"]
    elif settings["method"] == "lora":
        if settings["gpus"] > 1 and not settings["launch"].startswith("zero3"):
            advice.append("`launch: zero3`")
        advice.append("`method: qlora`")
    largest = max(parts, key=parts.get)
    if largest in ("activations", "logits") or not advice:
        advice.append("a shorter max_length")
    return f"The largest part is {largest}. Try: {', '.join(advice)}."
