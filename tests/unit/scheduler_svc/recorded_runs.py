"""Random runs of a scheduler core with a simulated worker, recorded like the scheduler's."""

import contextlib
import io
import random
import struct
from collections import deque
from dataclasses import replace
from zlib import crc32

import msgspec
import numpy as np

from contract.info import MemoryLevel, WorkerInfo
from contract.sampling import EarlyStopping
from contract.worker_limits import Limits
from scheduler_svc.core.interface.config import Eviction, SchedulerConfig
from scheduler_svc.core.interface.errors import RequestRefusedError, ResizeRefusedError
from scheduler_svc.core.interface.request import BeamParams, OutputSoFar, Request, SeqKey, SourceId
from scheduler_svc.journal.entries import MAGIC
from scheduler_svc.journal.record import Recordings
from scheduler_svc.journal.replay import replay
from tests.property.worker import SEARCH, FakeWorker

CONFIG = SchedulerConfig(
    num_blocks=10,
    block_size=2,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    max_model_len=24,
    max_waiting=6,
    watermark=0.0,
    eviction=Eviction.LFU,
)
INFO = WorkerInfo("w/0", "none", "m", Limits(4, 24, 8, 10, 2, 2), (1,), 0, "")


class Driver:
    """Random routers and a worker around a core."""

    searches = 0.0

    def __init__(self, core, seed):
        self.core = core
        self.dice = random.Random(seed)
        # separate, so that the requests stay the same
        self.more_dice = random.Random(f"more {seed}")
        self.worker = FakeWorker(core.config)
        self.unanswered = deque()
        self.now = 100.0
        self.num_submitted = 0
        self.plans = []

    def run(self, num_turns):
        actions = [self.submit, self.schedule, self.schedule, self.update, self.update]
        for _ in range(num_turns):
            self.now += 0.25
            self.dice.choice(actions)()
            if self.dice.random() < 0.03:
                self.core.cancel(SourceId(0), [self.dice.randrange(self.num_submitted + 1)])
            if self.dice.random() < 0.01:
                self.core.cancel_source(SourceId(1))
            if self.more_dice.random() < 0.01:
                self.core.defragment()
            if self.num_submitted % 8 == 0:
                self.core.unpin("", f"r{self.num_submitted - 1}")
        for _ in range(300):
            self.schedule()
            self.update()

    def submit(self):
        prompt = [self.dice.randrange(2) for _ in range(self.dice.randint(1, 12))]
        n = self.dice.randint(1, 2)
        request = Request(
            source=SourceId(self.dice.randrange(2)),
            first_seq_key=SeqKey(self.num_submitted),
            request_id=f"r{self.num_submitted}",
            prompt_token_ids=np.array(prompt, np.int32),
            n=n,
            max_tokens=self.dice.randint(1, 14),  # some are too long
            sampling=b"",
            cache_pin_s=self.more_dice.choice([None, None, 5.0]),
        )
        if self.dice.random() < 0.1:
            known = OutputSoFar(np.array([0], np.int32), finished=False)
            request = replace(request, max_tokens=9, outputs=(known,) * n)
        elif self.searches and self.dice.random() < self.searches:
            beam = BeamParams(2, (1,), self.dice.random(), EarlyStopping.NEVER)
            request = replace(request, sampling=SEARCH, beam=beam)
        self.num_submitted += n
        with contextlib.suppress(RequestRefusedError):
            self.core.submit(request, self.now)

    def schedule(self):
        if (plan := self.core.schedule(self.now)) is not None:
            self.plans.append(plan)
            self.unanswered.append(self.worker.execute(plan))

    def update(self):
        if self.unanswered:
            self.core.update(self.unanswered.popleft())


class DriverOfSearches(Driver):
    """A driver in which half of the requests are beam searches."""

    searches = 0.5


class DriverOfBadMemory(Driver):
    """A driver whose worker's host blocks go bad."""

    def schedule(self):
        if self.dice.random() < 0.2:
            self.worker.corrupt_host([self.dice.randrange(self.core.config.num_host_blocks)])
        super().schedule()


class DriverOfResizes(Driver):
    """A driver whose worker's pool grows and shrinks; some shrinks fail."""

    num_shrunk = 0

    def schedule(self):
        if self.more_dice.random() < 0.05:
            self.resize()
        super().schedule()

    def resize(self):
        least, most = self.core.config.num_blocks, self.core.config.max_num_blocks
        if self.core.load().num_blocks == least:
            self.worker.resize(most)
            self.core.resize(most)
        elif self.core.resizing.is_shrunk:
            self.worker.resize(self.more_dice.choice([least, most]))
            self.num_shrunk += self.worker.num_blocks == least
            self.core.resize(self.worker.num_blocks)
        else:
            with contextlib.suppress(ResizeRefusedError):
                self.core.shrink(least)


class DriverOfPressure(Driver):
    """A driver whose worker's memory is short at times."""

    def schedule(self):
        if self.more_dice.random() < 0.1:
            levels = [MemoryLevel.OK, *MemoryLevel]
            self.core.set_memory_level(self.more_dice.choice(levels))
        super().schedule()


def record(folder, seed=1, max_bytes=1 << 30, num_turns=600, config=CONFIG):
    """Record a random run; return the file and the driver."""
    with Recordings(folder, max_bytes, epoch=7) as records, records.open_core(INFO, config) as core:
        driver = Driver(core, seed)
        driver.run(num_turns)
    (path,) = folder.iterdir()
    return path, driver


def replay_bytes(content, **options):
    return replay(io.BytesIO(content), **options)


def to_frame(payload):
    return struct.pack("<II", len(payload), crc32(payload)) + payload


def payloads(path):
    """Return the payload of each frame, the origin's first."""
    content, found = path.read_bytes()[len(MAGIC) :], []
    while content:
        (length,) = struct.unpack_from("<I", content)
        found.append(content[8 : 8 + length])
        content = content[8 + length :]
    return found


def nothing(value):
    """Leave a value as it is."""
    _ = value


def rewrite(path, change=nothing, change_origin=nothing):
    """Return the recording with changed entries and origin (both dicts), and right checksums."""
    content = MAGIC
    for number, payload in enumerate(payloads(path)):
        value = msgspec.msgpack.decode(payload)
        (change if number else change_origin)(value)
        content += to_frame(msgspec.msgpack.encode(value))
    return content
