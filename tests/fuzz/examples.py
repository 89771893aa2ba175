"""Well-formed messages of each kind, from which fuzzing starts."""

from contract.codec.packing import pack_int32, pack_uint64
from quire.v1 import common_pb2, inference_pb2, scheduler_pb2, worker_pb2

SAMPLING = common_pb2.SamplingParams(
    temperature=0.5, top_k=3, top_p=0.9, seed=1, max_tokens=4, logit_bias={3: 1.0}, logprobs=2
)
_GREEDY = common_pb2.SamplingParams(temperature=0, seed=1, max_tokens=4)
_STRUCTURED = common_pb2.SamplingParams(
    seed=1, max_tokens=4, structured=common_pb2.StructuredOutput(json_schema='{"type":"object"}')
)
_GRAMMAR = common_pb2.SamplingParams(
    seed=1,
    max_tokens=4,
    structured=common_pb2.StructuredOutput(grammar="%llguidance {}\nstart: /a/"),
)

GENERATE = (
    inference_pb2.GenerateRequest(text="hello", sampling=_GREEDY),
    inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[5, 6]), sampling=SAMPLING, n=2, stop=["x"],
        request_id="r",
    ),
    inference_pb2.GenerateRequest(text="a", beam=common_pb2.BeamSearch(width=2)),
    inference_pb2.GenerateRequest(text="a", sampling=_STRUCTURED, resumable=True),
    inference_pb2.GenerateRequest(text="a", sampling=_GRAMMAR, cache_salt="s", cache_pin_s=5),
)  # fmt: skip
RESUME = (
    inference_pb2.ResumeRequest(
        request_id="r",
        received=[inference_pb2.OutputReceived(output_index=0, num_tokens=1)],
    ),
)  # fmt: skip

SUBMITS = (
    scheduler_pb2.Submit(
        request_id="r", first_seq_key=1, n=1, prompt_token_ids=pack_int32([1, 2, 3]),
        sampling=_GREEDY,
    ),
    scheduler_pb2.Submit(
        request_id="s", first_seq_key=8, n=2, prompt_token_ids=pack_int32(range(1, 20)),
        sampling=SAMPLING, tenant="t", priority=3, deadline_s=5, resume_record=b"",
        outputs=[
            scheduler_pb2.OutputSoFar(token_ids=pack_int32([4, 5])),
            scheduler_pb2.OutputSoFar(token_ids=pack_int32([4]), finished=True),
        ],
    ),
    scheduler_pb2.Submit(
        request_id="b", first_seq_key=20, n=2, prompt_token_ids=pack_int32([1, 2, 3]),
        sampling=_GREEDY, beam=common_pb2.BeamSearch(width=3), cache_pin_s=2,
    ),
)  # fmt: skip

CONNECT_REQUESTS = (
    *(scheduler_pb2.ConnectRequest(submit=submit) for submit in SUBMITS),
    scheduler_pb2.ConnectRequest(cancel=scheduler_pb2.Cancel(seq_keys=[1, 9])),
    scheduler_pb2.ConnectRequest(
        resume=scheduler_pb2.Resume(request_id="s", tenant="t", first_seq_key=40)
    ),
    scheduler_pb2.ConnectRequest(unpin=scheduler_pb2.Unpin(request_id="s", tenant="t")),
    scheduler_pb2.ConnectRequest(leave=scheduler_pb2.Leave(seq_keys=[8])),
    scheduler_pb2.ConnectRequest(hello=scheduler_pb2.RouterHello(router_id="r")),
)

_LOGPROB = common_pb2.TokenLogprob(logprob=-1, top_token_ids=[1], top_logprobs=[-1])
_STEP = scheduler_pb2.StepOutput(
    step_id=1,
    seq_keys=pack_uint64([0, 1]),
    token_ids=pack_int32([5, 6]),
    logprobs=[scheduler_pb2.IndexedLogprob(index=0, logprob=_LOGPROB)],
    admitted=[scheduler_pb2.SequenceAdmitted(seq_key=0, num_cached_tokens=1)],
    pinned=[scheduler_pb2.SequencePinned(seq_key=0, num_pinned_tokens=1)],
)
_END = scheduler_pb2.StepOutput(
    finished=[
        scheduler_pb2.SequenceFinished(
            seq_key=0, finish_reason=common_pb2.FINISH_REASON_STOP, stop_token_id=1
        ),
        scheduler_pb2.SequenceFinished(
            seq_key=1,
            finish_reason=common_pb2.FINISH_REASON_ERROR,
            error=common_pb2.OutputError(code=13, message="m"),
        ),
    ]
)
_RESUME_RECORD = inference_pb2.GenerateRequest(stop=["x"]).SerializeToString()
CONNECT_RESPONSES = (
    scheduler_pb2.ConnectResponse(step=_STEP),
    scheduler_pb2.ConnectResponse(step=_END),
    scheduler_pb2.ConnectResponse(
        refused=scheduler_pb2.Refused(first_seq_key=0, code=8, message="full", retry_after_s=0.1)
    ),
    scheduler_pb2.ConnectResponse(
        resumed=scheduler_pb2.Resumed(
            submit=scheduler_pb2.Submit(
                request_id="r", first_seq_key=0, n=2, prompt_token_ids=pack_int32([5, 6]),
                sampling=SAMPLING, resume_record=_RESUME_RECORD,
            ),
            so_far=_STEP,
        )
    ),
    scheduler_pb2.ConnectResponse(
        welcome=scheduler_pb2.SchedulerWelcome(
            epoch=1, model=common_pb2.ModelInfo(id="weights", max_model_len=64, vocab_size=500)
        )
    ),
)  # fmt: skip

WORKER_INFOS = (
    worker_pb2.WorkerInfo(
        worker_id="w",
        model=common_pb2.ModelInfo(
            id="fake", max_model_len=512, vocab_size=1000, eos_token_ids=[0]
        ),
        max_num_seqs=64,
        max_num_batched_tokens=256,
        num_saturating_tokens=64,
        num_blocks=256,
        block_size=4,
        block_bytes=64,
        num_host_blocks=8,
        swap_bytes_per_s=1e9,
        prefill_tokens_per_s=1e4,
        instance_id=1,
    ),
)

HOLDINGS = (
    worker_pb2.ReadHoldingsResponse(
        rows=[
            worker_pb2.HeldRow(
                identity=b"i",
                token_ids=pack_int32([5, 6, 7]),
                num_computed_tokens=2,
                block_ids=pack_int32([0]),
            )
        ]
    ),
    worker_pb2.ReadHoldingsResponse(
        device=worker_pb2.HeldBlocks(block_ids=pack_int32([0, 1]), labels=b"h" * 64),
        pins=worker_pb2.HeldPins(labels=b"h" * 32, left_s=[1.5]),
    ),
)

STEP_RESULTS = (
    worker_pb2.StepResult(
        epoch=1,
        step_id=1,
        sampled_rows=pack_int32([0, 1]),
        sampled_token_ids=pack_int32([5, 6]),
        logprobs=[worker_pb2.SampledLogprob(index=0, logprob=_LOGPROB)],
        prompt_logprobs=[worker_pb2.PromptLogprobs(row=0, position=1, logprobs=[_LOGPROB])],
        execute_s=0.1,
    ),
    worker_pb2.StepResult(epoch=1, step_id=1, failed_rows=pack_int32([2])),
)

FIRST_BATCH = worker_pb2.StepBatch(
    epoch=1,
    step_id=1,
    new_sequences=[
        worker_pb2.NewSequence(
            seq_id=1,
            row=0,
            token_ids=pack_int32([5, 6, 7]),
            num_prompt_tokens=3,
            block_ids=pack_int32([0, 1, 2]),
            sampling=_GREEDY,
            max_total_tokens=12,
        )
    ],
    chunk_rows=pack_int32([0]),
    chunk_lens=pack_int32([3]),
)
DECODE_BATCH = worker_pb2.StepBatch(epoch=1, step_id=2, num_decodes=1)
STEP_BATCHES = (
    FIRST_BATCH,
    DECODE_BATCH,
    worker_pb2.StepBatch(epoch=1, step_id=3, released_rows=pack_int32([0])),
    worker_pb2.StepBatch(
        epoch=1, step_id=2, num_decodes=1,
        appended_rows=pack_int32([0]), appended_block_ids=pack_int32([3]),
        renamed_src_block_ids=pack_int32([0]), renamed_dst_block_ids=pack_int32([5]),
        kv_commands=worker_pb2.KvCommands(
            copy_src_block_ids=pack_int32([0]), copy_dst_block_ids=pack_int32([5]),
            swap_out_src_block_ids=pack_int32([1]), swap_out_dst_block_ids=pack_int32([2]),
        ),
    ),
)  # fmt: skip
