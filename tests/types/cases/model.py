"""The entities that the cases talk to."""

from __future__ import annotations

from domicile import Entity, handler


class Account(Entity, name="account", idle_s=60):
    @handler
    async def deposit(self, amount: int, *, note: str = "") -> int:
        return amount

    @handler(shared=True, timeout_s=2.0)
    async def owner(self) -> str:
        return self.id

    @handler
    async def close(self) -> None:
        self.after(1.0, self.deposit, 5, note="interest")
        self.passivate()


class Savings(Account, name="savings", role="vault"):
    @handler
    async def deposit(self, amount: int, *, note: str = "") -> int:
        return await super().deposit(amount, note=note)

    @handler
    async def interest(self, rate: float) -> float:
        return rate


class Door(Entity):
    @handler
    async def open(self) -> bool:
        return True


class NotAnEntity:
    async def deposit(self, amount: int) -> int:
        return amount
