"""How the tokens of one output become deltas."""

from contract.codec.outputs import event_to_proto
from contract.outputs import FinishReason, OutputFinished, TokenLogprob
from contract.sampling import MAX_LOGPROBS
from router.live.output import MAX_DELTA_CHARS, MAX_EVENT_TOKENS, LiveOutput
from router.live.stop_strings import StopMatcher

GRPC_DEFAULT_BYTES = 4 << 20


class Letters:
    def push(self, token_id):
        return chr(ord("a") + token_id % 26)

    def flush(self):
        return "."


def test_a_slow_reader_gets_deltas_that_every_client_accepts():
    output = LiveOutput(0, Letters(), StopMatcher((), include_in_output=False), frozenset())
    num_tokens = 2 * MAX_EVENT_TOKENS + 5
    for token_id in range(num_tokens):
        top = tuple((150_000 + i, -1.5 - i) for i in range(MAX_LOGPROBS))
        output.push(token_id, TokenLogprob(-float(token_id), top))
    end = OutputFinished(0, FinishReason.LENGTH)
    output.finish(end)
    *deltas, last = iter(output.take, None)
    assert last is end
    assert len(deltas) == 3
    for delta in deltas:
        assert event_to_proto("r", delta).ByteSize() < GRPC_DEFAULT_BYTES / 4
        assert delta.token_ids[0] == delta.token_offset
        assert [-each.logprob for each in delta.logprobs] == [*delta.token_ids]
    assert [t for delta in deltas for t in delta.token_ids] == [*range(num_tokens)]
    assert "".join(delta.text for delta in deltas) == (
        "".join(map(Letters().push, range(num_tokens))) + "."
    )


class LongTokens:
    def push(self, token_id):
        return chr(ord("\N{GRINNING FACE}") + token_id) * 512

    def flush(self):
        return ""


def test_long_text_that_waits_for_a_slow_reader_becomes_several_deltas():
    output = LiveOutput(0, LongTokens(), None, frozenset())
    num_tokens = MAX_EVENT_TOKENS
    for token_id in range(num_tokens):
        output.push(token_id, None)
    deltas = []
    while not deltas or output.has_rest:
        deltas.append(output.take())
    assert output.take() is None
    assert len(deltas) == num_tokens * 512 // MAX_DELTA_CHARS
    assert all(event_to_proto("r", each).ByteSize() < GRPC_DEFAULT_BYTES / 2 for each in deltas)
    assert [len(each.token_ids) for each in deltas] == [num_tokens] + [0] * (len(deltas) - 1)
    assert all(each.token_offset == num_tokens for each in deltas[1:])
    assert "".join(each.text for each in deltas) == "".join(
        map(LongTokens().push, range(num_tokens))
    )
