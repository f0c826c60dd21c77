# SPDX-License-Identifier: Apache-2.0
"""The report: right numbers, one file, the same when nothing changed."""

from __future__ import annotations

import html.parser
import io
import json
import sys

import pytest

from hidden_state_bridge.__main__ import main
from hidden_state_bridge.errors import Refusal
from hidden_state_bridge.report import summarize, write_report

IDENTITY = {"dataset": "d" * 64, "weights": "w", "layers": [1, 29, 57], "final": "post_norm", "dtype": "bfloat16"}


def host(name, records, first=0, **more):
    info = {
        "done": f"{first}-{first + records - 1}" if records else "",
        "state": "done",
        "run": "0123456789ab",
        "identity": IDENTITY,
        "provenance": {"host": name, "sglang_version": "0.5.20", "capture_args": ["--disable-radix-cache", "<b>"]},
        "records_done": records,
        "tokens_done": records * 1000,
        "bytes": records * 57_344_000,
        "sources": {"A2": {"records": records, "tokens": records * 1000, "bytes": records * 57_344_000}},
        "lengths": [[1024, records]],
        "pace": {"seconds": 10, "tokens": [[1769860800, 600 * records], [1769860810, 400 * records]]},
        "failures": [],
        "status": {"seconds_total": 10.0, "started_at": "2026-01-31T12:00:00Z", "updated_at": "2026-01-31T12:00:10Z"},
        "output_dir": f"/out/{name}",
        "verify": {"ok": True, "checked": 5, "problems": []},
    }
    return {**info, **more}


@pytest.fixture
def request_():
    return {"format": "specforge", "dataset": {"records": 50, "tokens": 50_000}, "hosts": {"b": host("b", 20, 30), "a": host("a", 30)}}


def test_totals(request_):
    report = summarize(request_)
    assert report["totals"] == {
        "records": 50,
        "twice": 0,
        "tokens": 50_000,
        "bytes": 50 * 57_344_000,
        "tok_s": 5000.0,
        "records_expected": 50,
        "tokens_expected": 50_000,
        "left": 0,
        "failed": 0,
        "complete": True,
        "verified": True,
    }
    assert [row["host"] for row in report["hosts"]] == ["a", "b"]
    assert report["sources"] == [{"name": "A2", "records": 50, "tokens": 50_000, "bytes": 50 * 57_344_000}]


def test_a_record_of_two_hosts_counts_once(request_):
    request_["hosts"]["b"] = host("b", 20, 25)
    report = summarize(request_)
    totals = report["totals"]
    assert (totals["records"], totals["twice"], totals["complete"]) == (45, 5, False)


def test_a_pilot_is_complete_with_its_own_records_and_a_share_that_was_not_reached_is_named(request_, tmp_path):
    request_["hosts"].pop("b")
    request_.update(expected={"records": 30, "tokens": 30_000}, held={"far": {"records": 7, "tokens": 7_000}})
    totals = summarize(request_)["totals"]
    assert (totals["complete"], totals["records_expected"]) == (True, 30)
    assert "Held      7 records that far did or was given; it was not asked" in write_report(request_, str(tmp_path))["summary"]


def test_a_second_pilot_is_not_complete_with_the_records_of_the_first(request_, tmp_path):
    request_["hosts"] = {"a": host("a", 20), "b": host("b", 15, 30, state="incomplete", refused=["45-49"])}
    request_.update(expected={"records": 30, "tokens": 30_000, "wanted": "10-19,30-49"})
    totals = summarize(request_)["totals"]
    assert (totals["records"], totals["left"], totals["failed"], totals["complete"]) == (35, 5, 5, False)
    assert "Records   25 of 30, 10 beyond them, 5 failed" in write_report(request_, str(tmp_path))["summary"]
    request_["hosts"]["b"] = host("b", 20, 30)
    assert summarize(request_)["totals"]["complete"] is True


def test_failures_beyond_the_listed_ones_count(request_, tmp_path):
    failures = [{"record": 10 + number, "reason": "too long"} for number in range(20)]
    request_["hosts"]["a"] = host("a", 10, state="incomplete", failures=failures, refused=["10-28", "29,35-39,50-99"])
    report = summarize(request_)
    assert report["totals"]["failed"] == 70 and [row["state"] for row in report["hosts"]] == ["incomplete", "done"]
    assert "          and 50 more, see the report" in write_report(request_, str(tmp_path))["summary"]
    request_["hosts"]["a"].update(failures=[])
    assert summarize(request_)["hosts"][0]["state"] == "incomplete"


def test_nothing_at_all_is_not_verified(request_):
    request_["hosts"] = {"a": host("a", 0, state="failed", broke="why")}
    assert summarize(request_)["totals"]["verified"] is False


def test_second_copies_are_said_beside_what_counts_them(request_, tmp_path):
    request_["hosts"]["b"] = host("b", 20, 25)
    summary = write_report(request_, str(tmp_path))["summary"]
    assert "Tokens    50,000, second copies with them" in summary and "Bytes     2.87 GB, second copies with them" in summary


class Tags(html.parser.HTMLParser):
    """Notes what stays open, and every address."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_files_and_summary(tmp_path, request_):
    result = write_report(request_, str(tmp_path / "r"))
    assert result["changed"]
    text = (tmp_path / "r" / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and tags.addresses == []
    assert "50 / 50" in text and "2.87 GB" in text and "torch.load" in text
    assert "&lt;b&gt;" in text and "<b>--" not in text
    assert json.loads((tmp_path / "r" / "report.json").read_text())["totals"]["records"] == 50
    assert (tmp_path / "r" / "summary.txt").read_text().splitlines() == result["summary"]
    assert result["summary"] == [
        "Run       0123456789ab · specforge of layers 1, 29, 57 and post_norm · bfloat16",
        "Hosts     2 (a, b)",
        "Records   50 of 50",
        "Tokens    50,000",
        "Bytes     2.87 GB",
        "Speed     5,000 tok/s",
        "Verified  all names and sizes right, 10 files hashed and right",
        "Files     a:/out/a",
        "Files     b:/out/b",
    ]
    assert not write_report(request_, str(tmp_path / "r"))["changed"]


def test_failures_and_problems_are_listed(tmp_path, request_):
    problem = {"id": 3, "file": "specforge/rows_0-2000/data_3.ckpt", "reason": "is missing"}
    request_["hosts"]["a"] = host(
        "a",
        29,
        state="failed",
        failures=[{"record": 29, "source": "A2", "line": 17, "reason": "HTTP 400: too <long>"}],
        broke="Watch the extraction: failed\nits log <says> why",
        verify={"ok": False, "checked": 5, "problems": [problem]},
    )
    result = write_report(request_, str(tmp_path))
    assert "Records   49 of 50, 1 failed" in result["summary"]
    assert "Verified  1 files are not as the manifest says" in result["summary"]
    assert "Failed    record 29 (A2 line 17) on a: HTTP 400: too <long>" in result["summary"]
    assert "Broke     a: Watch the extraction: failed" in result["summary"]
    text = (tmp_path / "report.html").read_text()
    assert "HTTP 400: too &lt;long&gt;" in text and "data_3.ckpt" in text and "is missing" in text
    assert '<td>A2</td><td class="n">17</td>' in text and "its log &lt;says&gt; why" in text
    assert not any("Hosts that broke" in line for line in write_report({"hosts": {"a": host("a", 1)}}, str(tmp_path))["summary"])
    assert "Hosts that broke" not in (tmp_path / "report.html").read_text()


def test_a_record_that_failed_on_one_host_and_is_done_on_another_has_not_failed(tmp_path, request_):
    failures = [{"record": record, "reason": "HTTP 400"} for record in (29, 30, 49, 50)]
    request_["hosts"]["a"] = host("a", 29, state="incomplete", failures=failures)
    request_["hosts"]["b"] = host("b", 20, 30, failures=[{"record": 29, "reason": "HTTP 500"}])
    request_["hosts"]["c"] = host("c", 0, state="incomplete", failures=failures[1:3])
    report = summarize(request_)
    assert [(row["record"], row["host"]) for row in report["failed"]] == [(29, "a"), (29, "b"), (50, "a")]
    assert report["totals"]["failed"] == 2 and report["totals"]["complete"] is False
    # What a host took over is a start of its own: it ended well, and the one before did not.
    assert [row["state"] for row in report["hosts"]] == ["incomplete", "incomplete", "done"]


def test_only_the_first_failures_are_in_the_summary(tmp_path, request_):
    request_["hosts"]["a"] = host("a", 20, failures=[{"record": 20 + number, "reason": "x"} for number in range(10)])
    request_["hosts"]["b"] = host("b", 1, 30, failures=[{"record": 31 + number, "reason": "x"} for number in range(12)])
    summary = write_report(request_, str(tmp_path))["summary"]
    assert sum(line.startswith("Failed    record ") for line in summary) == 20 and "          and 2 more, see the report" in summary


def test_lengths_and_throughput_of_all_hosts(tmp_path, request_):
    request_["hosts"]["b"].update(lengths=[[512, 2], [1024, 18]], pace={"seconds": 60, "tokens": [[1769860800, 20_000]]})
    report = summarize(request_)
    assert report["lengths"] == [[512, 2], [1024, 48]]
    # The wider bins of the two, a minute here.
    assert report["pace"] == {"seconds": 60, "tokens": [[1769860800, 50_000]]}
    write_report(request_, str(tmp_path))
    text = (tmp_path / "report.html").read_text()
    assert "<title>2026-01-31 12:00:00 UTC: 833 tok/s</title>" in text
    assert "2026-01-31 12:00:00 to 2026-01-31 12:01:00 UTC, all hosts; a bar is 1 m 00 s, the highest is 833 tok/s." in text
    assert text.count("<rect ") == 1 and 'style="width: 4.2%"' in text and 'style="width: 100.0%"' in text


def test_what_is_not_known_is_left_out(tmp_path, request_):
    """Hosts whose manifest is of an earlier release."""
    for info in request_["hosts"].values():
        info.pop("lengths")
        info.pop("pace")
    write_report(request_, str(tmp_path))
    text = (tmp_path / "report.html").read_text()
    assert "Throughput" not in text and "Lengths" not in text


def test_hosts_without_a_result_and_without_a_check(tmp_path, request_):
    request_["hosts"]["a"].pop("verify")
    request_["hosts"]["c"] = {"state": "absent", "output_dir": "/out/c"}
    result = write_report(request_, str(tmp_path))
    assert "Verified  not checked on every host" in result["summary"]
    assert "Hosts     2 (a, b)" in result["summary"]


def test_hosts_of_different_runs_are_refused(request_):
    request_["hosts"]["b"]["run"] = "ffffffffffff"
    with pytest.raises(Refusal, match=r"different runs \(a has 0123456789ab, b has ffffffffffff\)"):
        summarize(request_)


def test_a_host_with_another_run_in_its_directory_does_not_name_the_layers(request_):
    other = host("0", 0, state="failed", run="ffffffffffff", identity={**IDENTITY, "layers": [5]}, broke="holds run ffffffffffff")
    report = summarize({**request_, "hosts": {**request_["hosts"], "0": other}})
    assert (report["run"], report["identity"]) == ("0123456789ab", IDENTITY)


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path, request_, monkeypatch):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hidden_state_bridge.report.os.chmod", full)
    with pytest.raises(Refusal, match="cannot be written to .*: No space left on device; choose another directory"):
        write_report(request_, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_command(tmp_path, request_, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request_)))
    assert main(["report", "--out-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert lines[:-1] == result["summary"]
    assert result["files"]["html"] == str(tmp_path / "report.html")
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}"))
    assert main(["report", "--out-dir", str(tmp_path)]) == 1
    assert "a report needs" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request_)))
    assert main(["report", "--out-dir", "/proc/nowhere"]) == 1
    assert "cannot be written to /proc/nowhere" in capsys.readouterr().err
