"""Connections to brokers: one to each, however many ask at a time."""

import asyncio

from proxy.progress.link import ClusterAccess, Link

BROKER = ("broker", 9092)


class Connection:
    """Answers a question with the question."""

    is_open = True

    def connected(self):
        return self.is_open

    async def send(self, request):
        return request

    def close(self):
        self.is_open = False
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Wires(Link):
    """A link that keeps all connections that were ever made."""

    def __init__(self):
        super().__init__(ClusterAccess((BROKER,), None, "client"))
        self.made = []

    async def _connect(self, _address):
        await asyncio.sleep(0)  # whoever else asks gets as far as this
        self.made.append(Connection())
        return self.made[-1]


async def test_who_asks_at_the_same_time_shares_one_connection():
    link = Wires()
    assert await asyncio.gather(*(link.ask(number) for number in range(3))) == [0, 1, 2]
    assert len(link.made) == 1
    await link.drop()
    assert not link.made[0].connected()


async def test_a_connection_that_was_closed_is_opened_anew():
    link = Wires()
    await link.ask(1)
    link.made[0].close()
    await link.ask(2)
    assert [made.connected() for made in link.made] == [False, True]
