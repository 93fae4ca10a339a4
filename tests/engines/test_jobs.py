"""Promises of jobs and replies: what is written is read, on any machine; anything else is one sentence."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import plan

from sordino import codec
from sordino.config import parse
from sordino.engines.messages import MOST_BROADCAST, Frame, Job, Reply, read_plan
from sordino.errors import DataError
from sordino.parts.encoding import Clip, Public
from sordino.parts.sparsify import PublicMask
from sordino.recipes import RECIPES
from sordino.recipes.starters import example

RUN, SIZE = "0123456789abcdef" * 2, 10
PLAN, SPARSE = plan(), plan(encode=(PublicMask(0.3), Clip(1.0)))
START = torch.linspace(-1, 1, SIZE)
TOLD = {"control": torch.full((SIZE,), 0.25)}
JOBS = {
    "admission": Job(RUN, PLAN, 5, "secure"),
    "a round": Job(RUN, PLAN, 0, "simulation", 3, 1.8e9, Public(1, 0.1, SIZE), START),
    "for release": Job(RUN, PLAN, 0, "secure", None, math.inf, Public(1, math.inf, SIZE), START, 7),
    "mask": Job(RUN, SPARSE, 2, "secure", public=Public(0, 0.1, SIZE, torch.tensor([1, 4, 9])), start=START),
    "shared": Job(RUN, PLAN, 2, "secure", public=Public(0, 0.1, SIZE, None, TOLD), start=START),
}
ASKED = JOBS["a round"]
ROW = torch.linspace(0, 1, SIZE)


def same(a: Job, b: Job) -> bool:
    """All of two jobs, tensors too."""
    names = ("run", "plan", "client", "mode", "seed", "deadline", "paid")
    plain = all(getattr(a, name) == getattr(b, name) for name in names)
    return plain and a.to_bytes() == b.to_bytes() and a.id == b.id


@pytest.mark.parametrize("name", JOBS)
def test_what_a_server_writes_is_what_a_silo_reads(name: str) -> None:
    job = JOBS[name]
    read = Job.from_bytes(job.to_bytes(), SIZE)
    assert same(job, read)
    assert read.admission == (name == "admission")
    if read.public is not None and job.public is not None and read.start is not None:
        assert torch.equal(read.start, START)
        assert (read.public.t, read.public.clip_norm, read.public.size) == (job.public.t, job.public.clip_norm, SIZE)
        assert all(torch.equal(read.public.broadcast[name], held) for name, held in job.public.broadcast.items())


@pytest.mark.parametrize(
    "reply",
    [
        Reply(ASKED.id, 0, ROW, charges=3),
        Reply(ASKED.id, 0, refused="the budget is spent"),
        Reply(ASKED.id, 0, refused="x" * 5000),
    ],
    ids=["row", "refusal", "long refusal"],
)
def test_what_a_silo_writes_is_what_a_server_reads(reply: Reply) -> None:
    read = Reply.from_bytes(reply.to_bytes(), ASKED, SIZE)
    assert (read.client, read.charges, bool(read.refused)) == (0, reply.charges, bool(reply.refused))
    assert (read.row is None) == (reply.row is None)
    if read.row is not None:
        assert torch.equal(read.row, ROW)


def test_a_job_has_one_name_whenever_it_is_asked_for_and_another_if_anything_else_differs() -> None:
    assert replace(ASKED, deadline=5.0).id == ASKED.id == replace(ASKED, paid=3).id
    others = [
        replace(ASKED, run="f" * 32),
        replace(ASKED, client=1),
        replace(ASKED, plan=plan(rounds=3)),
        replace(ASKED, public=Public(0, 0.1, SIZE)),
        replace(ASKED, start=START + 1e-6),
        replace(ASKED, seed=4),
    ]
    assert len({ASKED.id, *(job.id for job in others)}) == len(others) + 1


def test_every_kind_stands_ready_before_a_plan_is_read() -> None:
    """A fresh process that imports nothing but the jobs reads the plans of all recipes."""
    made = [codec.to_json(parse(tomllib.loads(example(name))).plan) for name in RECIPES]
    code = (
        "import sys, json\nfrom sordino.engines.messages import read_plan\nfor p in json.load(sys.stdin): read_plan(p)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(made), text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- what is refused -------------------------------------------------------------------------------------------------


def changed(body: bytes, **words: Any) -> bytes:
    """The same with other words in its head; None as a word takes it out."""
    line, _, rest = body.partition(b"\n")
    head = {**json.loads(line), **words}
    return json.dumps({name: value for name, value in head.items() if value != "gone"}).encode() + b"\n" + rest


def arrays(body: bytes, **instead: np.ndarray[Any, Any]) -> bytes:
    frame = Frame.of_bytes(body, 1 << 20, 1 << 20)
    return Frame(frame.kind, frame.fields, {**frame.arrays, **instead}).to_bytes()


WHOLE = ASKED.to_bytes()
NAN, SHORT, WIDE = np.full(SIZE, np.nan, "<f4"), np.zeros(SIZE - 1, "<f4"), np.zeros(SIZE, "<f8")
HUGE = np.zeros(10_000_000, "<f4")
MANY = {f"broadcast.{i}": np.zeros(SIZE, "<f4") for i in range(MOST_BROADCAST + 1)}
BAD_JOBS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no line"),
    "a pickle": (pickle.dumps(ASKED.run), "no line"),
    "not JSON": (b"{\n", "not JSON"),
    "nested": (b"[" * 100_000 + b"\n", "not JSON"),
    "no table": (b"[1]\n", "no JSON object"),
    "cut short": (WHOLE[:-1], "all of its"),
    "too long": (WHOLE + b"\0", "after its last array"),
    "ten times too large": (arrays(WHOLE, start=HUGE), "bytes"),
    "another format": (changed(WHOLE, format=2), "format 2"),
    "no format": (changed(WHOLE, format="gone"), "format None"),
    "format true": (changed(WHOLE, format=True), "format True"),
    "unknown kind": (changed(WHOLE, kind="erase"), "kind 'erase'"),
    "no word": (changed(WHOLE, kind=7), "kind 7"),
    "unknown word": (changed(WHOLE, code="rm"), "unknown entry 'code'"),
    "missing word": (changed(WHOLE, run="gone"), "missing entry 'run'"),
    "unknown array": (arrays(WHOLE, noise=SHORT), "unknown entry 'noise'"),
    "no start": (changed(JOBS["admission"].to_bytes(), kind="round"), "missing"),
    "NaN": (arrays(WHOLE, start=NAN), "NaN"),
    "wrong shape": (arrays(WHOLE, start=SHORT), "9 numbers"),
    "wrong dtype": (arrays(WHOLE, start=WIDE), "<f8"),
    "an object's dtype": (changed(WHOLE, arrays=[["start", "|O", 10]]), "type '|O'"),
    "negative length": (changed(WHOLE, arrays=[["start", "<f4", -10]]), "-10"),
    "wrong sizes": (changed(WHOLE, size=9), "size = 9"),
    "a round after the last": (changed(WHOLE, t=2), "t = 2"),
    "clip_norm NaN": (changed(WHOLE, clip_norm=math.nan), "clip_norm"),
    "clip_norm -1": (changed(WHOLE, clip_norm=-1), "clip_norm"),
    "seed in secure mode": (changed(WHOLE, mode="secure"), "a seed in secure mode"),
    "no seed in simulation": (changed(WHOLE, seed=None), "seed = None"),
    "another mode": (changed(WHOLE, mode="quiet"), "mode"),
    "a client that is none": (changed(WHOLE, client=6), "client = 6"),
    "client true": (changed(WHOLE, client=True), "client = True"),
    "paid below 0": (changed(WHOLE, paid=-1), "paid"),
    "deadline NaN": (changed(WHOLE, deadline=math.nan), "deadline"),
    "run of other letters": (changed(WHOLE, run="../../x"), "run ="),
    "no plan": (changed(WHOLE, plan=[]), "plan = []"),
    "a plan of an unknown kind": (changed(WHOLE, plan={**codec.dump(PLAN), "release": {"kind": "x"}}), "cannot run"),
    "a plan without a bound": (changed(WHOLE, plan={**codec.dump(PLAN), "encode": []}), "cannot run"),
    "a mask that the plan has not": (arrays(WHOLE, mask=np.arange(3, dtype="<i8")), "mask of 3"),
    "no mask where the plan has one": (changed(WHOLE, plan=codec.dump(SPARSE)), "mask of None"),
    "a mask out of range": (arrays(JOBS["mask"].to_bytes(), mask=np.array([1, 2, 10], "<i8")), "out of range"),
    "a coordinate twice": (arrays(JOBS["mask"].to_bytes(), mask=np.array([1, 1, 2], "<i8")), "twice"),
    "many shared": (arrays(WHOLE, **MANY), "broadcast"),
}


@pytest.mark.parametrize("name", BAD_JOBS)
def test_a_job_that_no_server_of_ours_sends_is_one_sentence(name: str) -> None:
    body, words = BAD_JOBS[name]
    with pytest.raises(DataError) as caught:
        Job.from_bytes(body, SIZE)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000


ANSWER = Reply(ASKED.id, 0, ROW, charges=1).to_bytes()
BAD_REPLIES: dict[str, tuple[bytes, str]] = {
    "NaN": (arrays(ANSWER, row=NAN), "NaN"),
    "infinity": (arrays(ANSWER, row=np.full(SIZE, np.inf, "<f4")), "infinity"),
    "wrong shape": (arrays(ANSWER, row=SHORT), "9 numbers"),
    "wrong dtype": (arrays(ANSWER, row=WIDE), "<f8"),
    "cut short": (ANSWER[:-3], "all of its"),
    "another job": (changed(ANSWER, job="0" * 64), "another job"),
    "another client": (changed(ANSWER, client=1), "another job"),
    "no row": (Reply(ASKED.id, 0).to_bytes(), "missing"),
    "a row and a refusal": (changed(ANSWER, refused="no"), "unknown entry 'row'"),
    "a job": (WHOLE, "kind"),
    "charges -1": (changed(ANSWER, charges=-1), "charges"),
    "a book of reasons": (changed(ANSWER, refused="x" * 3000), "refused"),
    "too large": (arrays(ANSWER, row=HUGE), "bytes"),
    "another plan's": (Reply(replace(ASKED, plan=SPARSE).id, 0, ROW).to_bytes(), "another job"),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_reply_that_no_silo_of_ours_sends_is_one_sentence(name: str) -> None:
    body, words = BAD_REPLIES[name]
    with pytest.raises(DataError) as caught:
        Reply.from_bytes(body, ASKED, SIZE)
    assert words in str(caught.value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
HEADS = sorted(json.loads(WHOLE.partition(b"\n")[0]))
WORDS = sorted(json.loads(ANSWER.partition(b"\n")[0]))


def read_or_refused(body: bytes) -> None:
    """Either a job that this program itself would write, or a `DataError`; nothing else."""
    try:
        job = Job.from_bytes(body, SIZE)
    except DataError:
        return
    assert Job.from_bytes(job.to_bytes(), SIZE).id == job.id


@given(st.sampled_from(HEADS), ANYTHING)
def test_any_word_of_a_job_may_be_anything(word: str, value: Any) -> None:
    read_or_refused(changed(WHOLE, **{word: value}))


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_any_byte_of_a_job_may_be_another(place: int, flip: int) -> None:
    body = bytearray(WHOLE)
    body[place] ^= flip
    read_or_refused(bytes(body))


@given(st.integers(0, len(WHOLE)), st.binary(max_size=40))
def test_a_job_may_end_anywhere_in_anything(end: int, rest: bytes) -> None:
    read_or_refused(WHOLE[:end] + rest)


@given(st.sampled_from(WORDS), ANYTHING)
def test_any_word_of_a_reply_may_be_anything(word: str, value: Any) -> None:
    try:
        read = Reply.from_bytes(changed(ANSWER, **{word: value}), ASKED, SIZE)
    except DataError:
        return
    assert (read.job, read.client) == (ASKED.id, 0)


@given(st.integers(0, len(ANSWER) - 1), st.integers(1, 255))
def test_any_byte_of_a_reply_may_be_another(place: int, flip: int) -> None:
    body = bytearray(ANSWER)
    body[place] ^= flip
    try:
        read = Reply.from_bytes(bytes(body), ASKED, SIZE)
    except DataError:
        return
    assert (read.job, read.client) == (ASKED.id, 0)
    assert read.row is None or bool(read.row.isfinite().all())


def test_a_plan_is_read_once() -> None:
    read_plan.cache_clear()
    for _ in range(3):
        Job.from_bytes(WHOLE, SIZE)
    assert read_plan.cache_info().misses == 1
