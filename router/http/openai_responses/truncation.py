"""Leaves out the oldest part of a conversation that is too long for the model's context."""

from collections.abc import Sequence
from dataclasses import dataclass

from contract.errors import InvalidArgumentError
from router.http.openai_responses.body import ResponseBody
from router.http.openai_responses.items import CallItem, CallOutputItem, Item, MessageItem
from router.http.requests.outputs import OutputPlan
from router.request.inference import Inference

_SHARE_FOR_OUTPUT = 8
"""If `max_output_tokens` is not set, at least the context's length divided by this number is left
for the output."""


async def truncated(
    inference: Inference, body: ResponseBody, earlier: Sequence[Item]
) -> tuple[str, OutputPlan]:
    """Return the prompt and the output plan of the longest chat that fits the context.

    If no chat fits, returns those of the shortest chat. May raise QuireError.
    """
    max_model_len = inference.model.info(body.model).max_model_len
    room = max_model_len - (body.max_output_tokens or max_model_len // _SHARE_FOR_OUTPUT)
    items = [*earlier, *body.items]
    cuts = [_Cut(0, 0), *_cuts(items)]

    async def prepared(position: int) -> tuple[str, OutputPlan]:
        shorter = body.model_copy(update={"input": cuts[position].kept(items)})
        return await shorter.conversation().prepare(inference)

    async def fits(position: int) -> bool:
        try:
            prompt, _ = await prepared(position)
            tokens = await inference.text.tokenize(body.model, prompt, add_special_tokens=False)
        except InvalidArgumentError:
            return False  # too long even to tokenize; other errors are raised below
        return len(tokens) <= room

    if await fits(0):
        return await prepared(0)
    fewest, most = min(1, len(cuts) - 1), len(cuts) - 1
    while fewest < most:
        middle = (fewest + most) // 2
        if await fits(middle):
            most = middle
        else:
            fewest = middle + 1
    return await prepared(fewest)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A cut that leaves out the items [begin, end), except the user's message at index `task`."""

    begin: int
    end: int
    task: int | None = None

    def kept(self, items: Sequence[Item]) -> list[Item]:
        task = [] if self.task is None else [items[self.task]]
        return [*items[: self.begin], *task, *items[self.end :]]


def _cuts(items: Sequence[Item]) -> list[_Cut]:
    """Return the possible cuts, from the smallest to the largest.

    The first cuts leave out whole turns, each of which begins with a message of the user. The other
    cuts also leave out the first steps of the last turn. Each step ends with results of calls. No
    cut lies between a call and its result. Items before the first message of the user always stay,
    and so does the last message of the user.
    """
    answered = {item.call_id for item in items if isinstance(item, CallOutputItem)}
    waiting: set[str] = set()
    turns: list[int] = []
    steps: list[int] = []
    for i, item in enumerate(items):
        if not waiting:
            if isinstance(item, MessageItem) and item.role == "user":
                turns.append(i)
                steps = []
            elif turns and _is_result(items[i - 1]) and not _is_result(item):
                steps.append(i)
        if isinstance(item, CallItem) and item.call_id in answered:
            waiting.add(item.call_id)
        elif isinstance(item, CallOutputItem):
            waiting.discard(item.call_id)
    cuts = [_Cut(turns[0], start) for start in turns[1:]]
    return cuts + [_Cut(turns[0], step, task=turns[-1]) for step in steps]


def _is_result(item: Item) -> bool:
    return isinstance(item, CallOutputItem)
