"""The page of a run: complete by itself, and clear about folders that are none."""

import itertools
import json
import re
from html.parser import HTMLParser

import pytest

from jaxaccel.reports.chart import Line, chart, short, ticks
from jaxaccel.reports.html import write_report
from jaxaccel.reports.run import load_run, parse_settings


CONFIG = """# written by a run

TrainConfig:
    num_steps = STEPS
    optim = @OptimConfig()

OptimConfig:
    peak_lr = 0.001
"""


def write_run(folder, steps=40, loss=5.0, text="def f(x):\n    return <b>x</b>"):
    folder.mkdir()
    rows = [
        {"kind": "baseline", "step": 0, "byte_bigram_nats_per_byte": 2.01},
        {"kind": "eval", "step": 0, "nats_per_byte": 2.4},
    ]
    for step in range(10, steps + 1, 10):
        rows.append(
            {
                "kind": "train",
                "step": step,
                "nats_per_token": None if step == 20 else loss - step / 100,
                "tokens_per_second": 1000.0 + step,
                "peak_memory_bytes": None,
                "mfu": None,
                "tokens_seen": step * 2048,
            }
        )
    rows += [
        {"kind": "eval", "step": steps, "nats_per_byte": 1.5},
        {"kind": "sample", "step": steps, "text": text},
        {"kind": "end", "step": steps, "interrupted": False, "train_seconds": 31.04},
    ]
    text = "".join(json.dumps({"time": 1.0, **row}) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.gin").write_text(CONFIG.replace("STEPS", str(steps)))
    return folder


class Balanced(HTMLParser):
    """Fails on tags that close what is not open, and collects the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read_page(path):
    page = path.read_text()
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    return page, parser.text


def test_one_run_makes_one_self_contained_page(tmp_path):
    run = write_run(tmp_path / "tiny")
    page, text = read_page(write_report([run], tmp_path / "out" / "report.html"))
    assert not re.search(r"https?://|<script|<link|src=|@import|url\(", page)
    for wanted in ("Held-out loss (nats/byte)", "byte bigram", "Throughput", "2.0100"):
        assert wanted in text
    assert "return <b>x</b>" in text
    assert "num_steps = 40" in text
    assert "Configuration differences" not in text
    # Curves without a value are left out, as are figures.
    assert "Peak memory" not in text
    assert "MFU" not in text


def test_several_runs_are_compared(tmp_path):
    first = write_run(tmp_path / "a", steps=40)
    second = write_run(tmp_path / "b", steps=80, loss=4.0)
    page, text = read_page(write_report([first, second], tmp_path / "report.html"))
    assert "TrainConfig.num_steps4080" in text
    assert "OptimConfig.peak_lr" not in text.split("Samples")[0]
    assert 'class="curve s0"' in page
    assert 'class="curve s1"' in page


def test_equal_configurations_are_said_to_be(tmp_path):
    runs = [write_run(tmp_path / name) for name in "ab"]
    assert (
        "configurations are equal"
        in read_page(write_report(runs, tmp_path / "report.html"))[1]
    )


def test_a_run_that_goes_on_and_has_no_config_can_be_read(tmp_path):
    folder = write_run(tmp_path / "a")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:9])
    (folder / "config.gin").unlink()
    run = load_run(folder)
    assert run.summary["state"] == "unfinished"
    assert run.summary["last step"] == "20"
    assert run.settings == {}
    read_page(write_report([folder], tmp_path / "report.html"))


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run folder .*missing"):
        write_report([tmp_path / "missing"], tmp_path / "report.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty holds no run"):
        write_report([tmp_path / "empty"], tmp_path / "report.html")
    (tmp_path / "empty" / "metrics.jsonl").write_text("{]\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged"):
        write_report([tmp_path / "empty"], tmp_path / "report.html")
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_settings_come_from_sections():
    assert parse_settings(CONFIG) == {
        "TrainConfig.num_steps": "STEPS",
        "TrainConfig.optim": "@OptimConfig()",
        "OptimConfig.peak_lr": "0.001",
    }


@pytest.mark.parametrize(
    "low, high", [(0.0, 1.0), (1.37, 6.21), (-3.0, 4e6), (5.0, 5.0), (0.0, 0.0)]
)
def test_ticks_span_the_values_at_equal_distances(low, high):
    marks = ticks(low, high)
    assert marks[0] <= low <= high <= marks[-1]
    assert 3 <= len(marks) <= 8
    steps = [b - a for a, b in itertools.pairwise(marks)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_short_numbers():
    assert [short(v) for v in (0.0, 0.125, 1500, 2.5e6, 3e9)] == [
        "0",
        "0.125",
        "1.5k",
        "2.5M",
        "3G",
    ]


def test_long_curves_keep_their_extremes():
    points = [(step, 1.0) for step in range(5000)]
    points[1234] = (1234, 9.0)
    drawn = chart("loss", "", [Line(label="a", points=points)])
    path = re.search(r' d="([^"]*)"', drawn).group(1)
    heights = [float(pair.split()[1]) for pair in re.split("[ML]", path)[1:]]
    assert len(heights) <= 410
    assert len(set(heights)) == 2


def test_a_curve_breaks_where_a_value_is_not_finite():
    points = [(0, 1.0), (1, 2.0), (2, float("nan")), (3, 1.0)]
    drawn = chart("loss", "", [Line(label="a", points=points)])
    assert re.search(r' d="([^"]*)"', drawn).group(1).count("M") == 2
    assert chart("loss", "", [Line(label="a", points=[(0, float("nan"))])]) == ""
