"""The page of a trace in a real browser: the slider is dragged, requests are pointed at, nothing is fetched.

Needs Chromium (Debian: `apt-get install chromium`). With REQUIRE_CHROMIUM=1 its absence is a failure.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chromium import Chromium, find_chromium
from picture_records import mixed_steps, two_sizes

from conformance.figures import timeline_data
from conformance.recording import RECORDINGS
from conformance.show_html import trace_page
from runner_api import SampleFault, Trace, load_trace

NAME = "preempt"
SLIDER = "document.getElementById('slider')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        if os.environ.get("REQUIRE_CHROMIUM") == "1":
            pytest.fail("REQUIRE_CHROMIUM=1, and no chromium is installed")
        pytest.skip("no chromium is installed (Debian: apt-get install chromium)")
    with Chromium(program, tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture
def page(browser: Chromium, tmp_path: Path) -> Chromium:
    """The page, opened anew at its first step."""
    file = tmp_path / "trace.html"
    file.write_text(trace_page(load_trace(RECORDINGS / f"{NAME}.jsonl")), encoding="utf-8")
    browser.requests.clear()
    browser.open(file)
    return browser


def step_of(page: Chromium) -> int:
    return int(page.value("now"))


def drag_slider(page: Chromium, part: float) -> None:
    """Press the slider's thumb, pull it to that part of its way, let go."""
    x, y, width = page.value(
        f"(() => {{ const r = {SLIDER}.getBoundingClientRect(); return [r.x, r.y + r.height / 2, r.width]; }})()"
    )
    thumb = x + 8 + (width - 16) * step_of(page) / 128
    end = x + 8 + (width - 16) * part
    page.mouse("mouseMoved", thumb, y)
    page.mouse("mousePressed", thumb, y, pressed=True)
    for k in range(1, 6):
        page.mouse("mouseMoved", thumb + (end - thumb) * k / 5, y, pressed=True)
    page.mouse("mouseReleased", end, y)


def assert_shows(page: Chromium, number: int) -> None:
    """The page shows exactly this step of the recording."""
    record = load_trace(RECORDINGS / f"{NAME}.jsonl").steps[number]
    assert page.value("document.getElementById('where').textContent").startswith(f"step {number} ")
    rows = page.value(
        "[...document.querySelectorAll('#requests tr')].slice(1).map(r => [...r.cells].map(c => c.textContent))"
    )
    tokens = record.tokens()
    assert [(r[1], int(r[3]), int(r[4]), int(r[5]), r[6]) for r in rows] == [
        (
            req_id, int(record.idx_mapping[i]), int(record.query_start_loc[i]), int(record.seq_lens[i]),
            " ".join(map(str, tokens[req_id])),
        )
        for i, req_id in enumerate(record.req_ids)
    ]  # fmt: skip
    cells = page.value(
        "[...document.querySelectorAll('#batch .token')].map(t => [...t.children].map(c => c.textContent.trim()))"
    )
    marks = {int(index): f"▲{row}" for row, index in enumerate(record.logits_indices)}
    assert cells == [
        [str(i), *map(str, (record.input_ids[i], record.positions[i], record.slot_mappings[0, i])), marks.get(i, "")]
        for i in range(record.num_tokens)
    ]
    framed = page.value(
        "[...document.querySelectorAll('#cache .written')].flatMap(w => {"
        " const block = parseInt(w.closest('.block').textContent), part = v => Math.round(parseFloat(v) / 100 * 16);"
        " const first = part(w.style.left), count = part(w.style.width);"
        " return Array.from({length: count}, (_, k) => block * 16 + first + k); })"
    )
    assert framed == sorted(int(s) for s in record.slot_mappings.ravel() if s >= 0)


def test_dragging_the_slider_shows_another_step(page: Chromium):
    assert_shows(page, 0)
    drag_slider(page, 0.5)
    middle = step_of(page)
    assert 50 < middle < 80
    assert_shows(page, middle)
    drag_slider(page, 1.0)
    assert_shows(page, 128)
    assert not page.exceptions()


def test_keys_and_buttons_move_the_slider(page: Chromium):
    page.value(f"{SLIDER}.focus()")
    page.key("End")
    assert_shows(page, 128)
    page.key("ArrowLeft")
    assert_shows(page, 127)
    page.key("Home")
    for selector, expected in (("#forward", 1), ("#forward", 2), ("#back", 1), ("#back", 0), ("#back", 0)):
        x, y = page.middle(selector)
        page.mouse("mousePressed", x, y, pressed=True)
        page.mouse("mouseReleased", x, y)
        assert step_of(page) == expected
    assert_shows(page, 0)


def test_arrow_keys_need_no_focus(page: Chromium):
    assert page.value("document.activeElement === document.body")
    for key, expected in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        page.key(key)
        assert step_of(page) == expected
    x, y = page.middle("#forward")
    page.mouse("mousePressed", x, y, pressed=True)
    page.mouse("mouseReleased", x, y)
    page.key("ArrowRight")  # the button has the focus
    assert step_of(page) == 3
    assert_shows(page, 3)


def test_pointing_at_a_token_tells_of_its_request(page: Chromium):
    record = load_trace(RECORDINGS / f"{NAME}.jsonl").steps[1]
    page.value("show(1)")
    tip = "document.getElementById('tip')"
    assert page.value(f"getComputedStyle({tip}).display") == "none"
    for req_id in record.req_ids[:3]:
        i = record.row_of(req_id)
        first = int(record.query_start_loc[i])
        page.mouse("mouseMoved", *page.middle(f"#batch .run:nth-child({i + 1}) .token"))
        text = page.value(f"{tip}.textContent")
        assert page.value(f"getComputedStyle({tip}).display") == "block"
        assert f"request {req_id}\n" in text
        assert f"row {record.idx_mapping[i]}," in text
        assert f"token {record.input_ids[first]} at position {record.positions[first]}," in text
        assert f"slot {record.slot_mappings[0, first]}" in text
        # what belongs to the request is marked, in the table and in the cache too, and nothing else is
        lit = page.value("[...document.querySelectorAll('.lit')].map(e => data.requests[e.dataset.request].id)")
        assert set(lit) == {req_id}
        lines = page.value("[...document.querySelectorAll('#requests tr.lit')].map(r => r.cells[1].textContent)")
        assert lines == [req_id]
        blocks = page.value("[...document.querySelectorAll('#cache .lit')].map(b => parseInt(b.textContent))")
        assert blocks == sorted(record.block_tables[0][i].tolist())
    page.mouse("mouseMoved", *page.middle("h1"))
    assert page.value(f"getComputedStyle({tip}).display") == "none"
    assert page.value("document.querySelectorAll('.lit').length") == 0


def test_a_wrong_query_start_loc_does_not_flood_the_page(browser: Chromium, tmp_path: Path):
    trace = load_trace(RECORDINGS / "hybrid.jsonl")
    loc = trace.steps[1].query_start_loc.copy()
    loc[-1] = 99999
    steps = (trace.steps[0], dataclasses.replace(trace.steps[1], query_start_loc=loc))
    file = tmp_path / "flood.html"
    file.write_text(trace_page(dataclasses.replace(trace, steps=steps), start=1), encoding="utf-8")
    browser.open(file)
    assert browser.value("document.querySelectorAll('#batch .token').length") == trace.steps[1].num_tokens
    assert "99999" in browser.value("document.querySelector('#batch .head.wrong').textContent")
    assert browser.value("document.querySelectorAll('#batch .head.wrong').length") == 1
    groups = len(trace.steps[1].slot_mappings)
    assert browser.value("[...document.querySelectorAll('#labels div')].map(d => d.textContent)") == [
        "index", "token id", "position", *(f"KV slot, group {g}" for g in range(groups)), "logits row",
    ]  # fmt: skip
    assert browser.value("document.getElementById('where').textContent").startswith("step 1 of 2 (0 … 1):")
    assert not browser.exceptions()


def open_trace(browser: Chromium, folder: Path, trace: Trace, start: int = 0) -> None:
    file = folder / "trace.html"
    file.write_text(trace_page(trace, start=start), encoding="utf-8")
    browser.open(file)


def test_what_is_wrong_in_a_record_is_orange(browser: Chromium, tmp_path: Path):
    trace = load_trace(RECORDINGS / f"{NAME}.jsonl")
    record = trace.steps[37]
    slots, logits, rows = record.slot_mappings.copy(), record.logits_indices.copy(), record.idx_mapping.copy()
    slots[0, 1], logits[1], rows[2], rows[3] = slots[0, 0], 500, -1, rows[0]
    faults = np.array([0, int(SampleFault.NAN), 0, 0, 0], np.int32)
    wrong = dataclasses.replace(record, slot_mappings=slots, logits_indices=logits, idx_mapping=rows, faults=faults)
    open_trace(browser, tmp_path, dataclasses.replace(trace, steps=(*trace.steps[:37], wrong, *trace.steps[38:])), 37)
    assert browser.value("document.getElementById('lost').textContent") == "Not on the axis: ▲1 at 500."
    orange = browser.value(
        "[...document.querySelectorAll('#requests td.wrong')].map(c => [c.textContent, getComputedStyle(c).color])"
    )
    first, vermilion = int(record.idx_mapping[0]), "rgb(213, 94, 0)"
    assert orange == [[text, vermilion] for text in (f"{first}, twice", "NaN", "-1", f"{first}, twice")]
    block = int(slots[0, 0]) // 16
    faulty = browser.value(
        "[...document.querySelectorAll('#cache .block.faulty')].map(b => [b.querySelector('.name span').textContent,"
        " getComputedStyle(b).borderTopColor, getComputedStyle(b.querySelector('.written.wrong')).borderTopColor])"
    )
    assert faulty == [[str(block), vermilion, vermilion]]
    browser.value("show(36)")
    assert browser.value("document.getElementById('lost').textContent") == ""
    assert browser.value("document.querySelectorAll('#requests td.wrong, .block.faulty, .written.wrong').length") == 0
    assert not browser.exceptions()


def test_blocks_on_the_page_are_as_full_as_their_owners_say(browser: Chromium, tmp_path: Path):
    fills = (
        "Object.fromEntries([...document.querySelectorAll('#cache .block')].map(b =>"
        " [b.querySelector('.name span').textContent, [...b.querySelectorAll('.filled')].map(f => f.style.width)]))"
    )
    open_trace(browser, tmp_path, Trace("two", {}, (two_sizes(),)))
    found = browser.value(fills)
    assert (found["1"], found["3"], found["8"], found["11"]) == (["100%"], ["100%"], ["18.75%"], ["37.5%"])
    assert browser.value("document.querySelector('h1').textContent") == "two: 2 requests over 1 step"
    open_trace(browser, tmp_path, load_trace(RECORDINGS / "hybrid.jsonl"), 11)
    found = browser.value(fills)
    assert found["7"] == found["29"] == ["100%", "50%"]


def test_numbers_of_blocks_and_of_requests_stand_apart(browser: Chromium, tmp_path: Path):
    open_trace(browser, tmp_path, Trace("numbers", {}, mixed_steps(1, True, "")))
    assert browser.value("document.querySelector('h1').textContent") == "numbers: 1 request over 2 steps"
    names = browser.value(
        "[...document.querySelectorAll('#cache .name')].map(n => [...n.children].map(c => c.textContent))"
    )
    assert names == [["1", "000"]]
    gap = browser.value(
        "(() => { const [a, b] = document.querySelector('#cache .name').children;"
        " return b.getBoundingClientRect().left - a.getBoundingClientRect().right; })()"
    )
    assert gap > 10


def test_a_long_timeline_does_not_push_the_batch_away(browser: Chromium, tmp_path: Path):
    open_trace(browser, tmp_path, Trace("many", {}, mixed_steps(64)))
    top = "document.getElementById('{}').getBoundingClientRect().top"
    assert browser.value("document.getElementById('timeline').scrollHeight") > 64 * 13
    assert browser.value(top.format("batch")) - browser.value(top.format("slider")) < 600
    # the numbers of the steps stay in sight, below their steps
    places = browser.value(
        "['#axis text', '#timeline [data-step=\"1\"] rect'].map(s => [...document.querySelectorAll(s)]"
        ".map(e => { const r = e.getBoundingClientRect(); return [e.textContent, r.x + r.width / 2]; }))"
    )
    assert places[0][1][0] == "1"
    assert abs(places[0][1][1] - places[1][0][1]) < 2


def test_marks_of_a_preemption_and_a_return_do_not_cover_each_other(page: Chromium):
    """One is in the upper half of the lane and one in the lower, however narrow the steps are."""
    ends = page.value(
        "['.away', '.back'].map((c, k) => Object.fromEntries([...document.querySelectorAll(`#timeline ${c}`)].map(e =>"
        " { const r = e.getBoundingClientRect(); return [e.parentNode.dataset.request, k ? r.top : r.bottom]; })))"
    )
    away, back = ends
    assert len(back) >= 3
    assert away.keys() >= back.keys()
    assert all(away[request] <= back[request] for request in back)


def test_the_timeline_tells_returns_and_ends(page: Chromium):
    lives = timeline_data(load_trace(RECORDINGS / f"{NAME}.jsonl")).lives
    assert page.value("document.querySelectorAll('#timeline .back').length") == sum(len(x.spans) - 1 for x in lives) > 0
    assert page.value("document.querySelectorAll('#timeline .end').length") == sum(x.end is not None for x in lives) > 0


def test_a_click_in_the_timeline_goes_to_its_step(page: Chromium):
    x, y = page.middle("#timeline [data-step='37']")
    page.mouse("mousePressed", x, y, pressed=True)
    page.mouse("mouseReleased", x, y)
    assert_shows(page, 37)
    assert "resumed: r009" in page.value("document.getElementById('plan').textContent")


def test_the_page_asks_for_nothing_but_itself(page: Chromium):
    drag_slider(page, 0.3)
    assert len(page.requests) == 1
    assert page.requests[0].startswith("file://")
    # its own policy forbids what a script would try
    refused = page.value(
        "new Promise(done => { document.addEventListener('securitypolicyviolation', e => done(e.blockedURI));"
        " fetch('http://127.0.0.1:1/').catch(() => 0); })"
    )
    assert refused == "http://127.0.0.1:1/"


def test_a_request_id_that_looks_like_markup_is_text(browser: Chromium, tmp_path: Path):
    trace = load_trace(RECORDINGS / "mixed.jsonl")
    evil = "</script><img src=x onerror='window.broken=1'>"
    steps = []
    for record in trace.steps[:3]:
        plan = dataclasses.replace(
            record.plan,
            scheduled_new_reqs=[
                dataclasses.replace(n, req_id=evil) if n.req_id == "r000" else n for n in record.plan.scheduled_new_reqs
            ],
        )
        ids = tuple(evil if r == "r000" else r for r in record.req_ids)
        counts = {evil if r == "r000" else r: n for r, n in plan.num_scheduled_tokens.items()}
        plan = dataclasses.replace(plan, num_scheduled_tokens=counts)
        steps.append(dataclasses.replace(record, plan=plan, req_ids=ids))
    file = tmp_path / "evil.html"
    file.write_text(trace_page(dataclasses.replace(trace, steps=tuple(steps), name="<b>")), encoding="utf-8")
    browser.open(file)
    assert browser.value("window.broken") is None
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.value("data.requests.map(r => r.id)").count(evil) == 1
    assert browser.value("document.title").startswith("<b>")
