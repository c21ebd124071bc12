"""The demo's six prompts, one of each kind of work."""

_PARAGRAPH = (
    "The lighthouse on the northern point was built in 1871 by a crew of forty masons. Its lamp burned whale oil "
    "until 1903, when the keeper, Anna Holm, fitted the first electric bulb. Storms took the outer wall twice, and "
    "twice the village carried the stones back up the cliff. Today the tower is a museum, open from May to September."
)
_CODE = """def total_price(items, tax):
    total = 0
    for item in items:
        total = total + item.price * item.count
    total = total + total * tax
    return total"""

PROMPTS: dict[str, str] = {
    "chat": "What should I pack for a three-day walk in the mountains?",
    "code": f"Repeat this Python function with the name total_price changed to order_total:\n\n{_CODE}",
    "rewriting": f"Copy the following paragraph word for word:\n\n{_PARAGRAPH}",
    "extraction": f"List every year that stands in this text, with the sentence it stands in:\n\n{_PARAGRAPH}",
    "list": "List ten animals that live in the sea, one on each line.",
    "story": "Write a short story about a fox who finds an old radio.",
}
