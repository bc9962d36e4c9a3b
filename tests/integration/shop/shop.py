"""A job whose agent is all a user's own: an environment as tools, two loops with a configuration, their reward."""

from __future__ import annotations

from typing import Any

from kestrl.agents import Call, Conversation
from kestrl.rewards import Attempt


class Shop:
    """A shop with a basket."""

    def __init__(self, currency: str) -> None:
        self.currency = currency

    def reset(self, stock: dict[str, int]) -> None:
        """Begins an episode."""
        self.stock, self.basket = dict(stock), dict[str, int]()

    def search(self, word: str) -> list[str]:
        """Finds items by a part of their name."""
        return [item for item in self.stock if word in item]

    def buy(self, item: str, count: int = 1) -> str:
        """Puts an item into the basket."""
        self.stock[item] -= count
        self.basket[item] = self.basket.get(item, 0) + count
        return f"{self.stock[item]} left"

    def state(self) -> dict[str, Any]:
        return {"basket": self.basket, "currency": self.currency}


class Buyer:
    """Buys between the model's turns, so that the environment is used whatever the model writes."""

    def __init__(self, count: int) -> None:
        self.count = count

    async def run(self, conversation: Conversation) -> float:
        await conversation.generate()
        calls = [
            Call(name="search", arguments={"word": "lamp"}, raw=""),
            Call(name="buy", arguments={"item": "lamp", "count": self.count}, raw=""),
        ]
        await conversation.call_tools(calls)
        reply = await conversation.generate()
        return 0.0 if reply is None else len(set(reply.text)) / 100


async def brief(conversation: Conversation) -> float:
    """One turn, without the shop."""
    reply = await conversation.generate()
    return 0.0 if reply is None else len(set(reply.text)) / 100


def bought(attempt: Attempt) -> float:
    """The number of lamps in the basket."""
    return float(attempt.episode.environments["Shop"]["basket"].get("lamp", 0))
