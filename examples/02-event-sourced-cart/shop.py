"""Ask carts: `python shop.py ann put lamp 2`, `python shop.py ann order n-17`."""

from __future__ import annotations

import asyncio
import sys

from cart import STORE, AlreadyOrdered, Cart, NotThatMany

from domicile import connect

USAGE = """usage: python shop.py NAME articles
       python shop.py NAME put|take-out ARTICLE COUNT
       python shop.py NAME order NUMBER"""


async def main(name: str, *words: str) -> None:
    """Wherever the cart is at home. A reply comes once its event is on the disk."""
    async with connect(STORE) as client:
        cart = client.ref(Cart, name)
        match words:
            case ["articles"]:
                print(await cart.ask(Cart.articles))
            case ["put", article, count]:
                print(f"{article}s: {await cart.ask(Cart.put, article, int(count))}")
            case ["take-out", article, count]:
                print(f"{article}s: {await cart.ask(Cart.take_out, article, int(count))}")
            case ["order", number]:
                print("ordered:", await cart.ask(Cart.order, number))
            case _:
                sys.exit(USAGE)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(USAGE)
    try:
        asyncio.run(main(*sys.argv[1:]))
    except AlreadyOrdered as refusal:
        sys.exit(f"too late, it was ordered as {refusal.args[0]}")
    except NotThatMany as refusal:
        sys.exit(f"the cart has {refusal.args[0]} of them")
