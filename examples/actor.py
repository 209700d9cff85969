"""An object that lives on another worker, used from asyncio: `farcall run -n 2 examples/actor.py`."""

import asyncio

import farcall


class Chat:
    """Lives on the second worker. Its coroutines run in the event loop of that worker."""

    def __init__(self, welcome: str) -> None:
        self.welcome = welcome
        self.said: list[str] = []

    async def say(self, text: str) -> str:
        await asyncio.sleep(0.01)
        self.said.append(text)
        return f"{self.welcome} {text}, says {farcall.worker().name}"


def count(chat: Chat, word: str) -> int:
    return sum(word in text for text in chat.said)


async def talk(worker: farcall.Worker) -> None:
    chat = worker.keep(Chat, "hello")  # goes when this function ends, and the object with it
    answers = await asyncio.gather(*[chat.submit(Chat.say, name) for name in ("tea", "salt", "tea")])
    print("\n".join(answers))
    print(await chat.submit(count, "tea"), "of", len(answers), "for tea")


async def main() -> None:
    async with farcall.Group() as group:
        if group.info.id == 0:
            await talk(group.worker("worker1"))


if __name__ == "__main__":
    asyncio.run(main())
