"""What a check can ask, and what of it a report, a proof and an attack show."""

import pytest
import torch

from minitrain.course import exercises
from minitrain.course.exercises import Report, Result
from minitrain.course.grading import answer_checks, book, trial
from minitrain.course.grading.answer_checks import Answer, expect_equal
from minitrain.course.grading.judge import Code
from minitrain.course.grading.trial import Failure, Outcome

# ---- what a check can ask --------------------------------------------------------------------------------


class Fake:
    def __init__(self, results=((7,),)):
        self.asked, self.results = [], [list(own) for own in results]

    def run(self, code, calls, **rules):
        self.asked.append((code, calls, rules))
        return Outcome(self.results)


GIVEN = Code(["def double(x): return 2 * x"], "def f(x): ...", ["def drive(x): ..."], ["f"])


def test_a_check_calls_an_answer_a_driver_or_what_is_given_and_nothing_else():
    fake = Fake([[7], [8]])
    with answer_checks.judging(fake, GIVEN, 5.0):
        outcome = answer_checks.run_on_ranks(Answer("f"), [1, (2, 3)], collectives="rotate", budget_bytes=9)
        answer_checks.run_on_ranks(Answer("drive"), [1, 2])
        answer_checks.run_on_ranks(Answer("double"), [1, 2])
        said = "^ranks cannot know g: no answer, given cell or driver defines it$"
        with pytest.raises(ValueError, match=said):
            answer_checks.run_on_ranks(Answer("g"), [1])
    assert outcome.results == [7, 8], "one call each: its result"
    (code, calls, rules), (driven, *_), (ours, *_) = fake.asked
    assert calls == [[(1,)], [(2, 3)]] and rules == {"budget_bytes": 9, "time_limit_s": 5.0}
    assert (code.call, code.collectives, code.answer) == ("f", "rotate", GIVEN.answer)
    assert (driven.call, driven.drivers, driven.answer) == ("drive", GIVEN.drivers, GIVEN.answer)
    assert (ours.call, ours.answer, ours.names, ours.drivers) == ("double", "", (), ()), "no answer is there"


def test_what_is_asked_alone_has_no_network_and_a_value_is_no_call():
    fake = Fake([[7, 8]])
    with answer_checks.judging(fake, GIVEN, 5.0):
        assert answer_checks.ask_each(Answer("f"), [(1,), (2, 3)]) == [7, 8]
        assert answer_checks.ask(Answer("f"), 1, 2) == 7
        assert answer_checks.ask_each(5, [(1,), (2,)]) == [5, 5] and answer_checks.ask("value") == "value"
    assert [calls for _, calls, _ in fake.asked] == [[[(1,), (2, 3)]], [[(1, 2)]]]
    assert all(rules["network"] is False for *_, rules in fake.asked)


def test_while_a_check_runs_there_is_one_thread_and_what_it_prints_is_dropped(capsys):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), answer_checks.judging(Fake(), GIVEN, 5.0):
            print("hidden")
            assert torch.get_num_threads() == 1 and answer_checks._judging.get()[2] == 5.0
            1 / 0
        assert torch.get_num_threads() == 2 and answer_checks._judging.get() is None
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "actual, expected, atol, said",
    [
        (3, 3, 0, None), (3, 4, 0, "hint"), (3, 4, 1, None), (3, 5, 1, "hint"),
        (3.0, 3, 0, "a value of type int is wanted, not a value of type float; hint"),
        (True, 1, 0, "a value of type int is wanted, not a value of type bool; hint"),
        ((1, 2), [1, 2], 0, None),
        ([1, 2, 3], [1, 2], 0, "a list of 2 is wanted, not a value of type list; hint"),
        ([1, [2, 9]], [1, [2, 3]], 0, r"hint \(seen at rank 1\)"),
        ([[9], [3]], [[2], [3]], 0, r"hint \(seen at rank 0\)"),
        (
            torch.ones(2), torch.ones(2, 1), 0,
            r"a float32 tensor of shape \[2, 1\] is wanted, not a float32 tensor",
        ),
        (torch.ones(2) + 0.5, torch.ones(2), 0.5, None),
        (torch.tensor([1.0, 1.6]), torch.ones(2), 0.5, "hint"),
        (torch.tensor([1.0, 0.4]), torch.ones(2), 0.5, "hint"),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), 0.5, "hint"),
    ],
)  # fmt: skip
def test_equal_means_of_one_kind_and_within_the_bound(actual, expected, atol, said):
    if said is None:
        return expect_equal(actual, expected, "p", "hint", atol)
    with pytest.raises(Failure, match=f"^p: {said}") as error:
        expect_equal(actual, expected, "p", "hint", atol)
    assert error.value.property == "p"


# ---- reports ---------------------------------------------------------------------------------------------

RESULTS = [
    Result("First", "a-1", "It adds", 2, 2),
    Result("First", "a-2", "It sends", 3, 0, "bytes", "bytes: too many", "line 1\nline 2"),
    Result("Second", "b-1", "It waits", 5, 5),
]


def test_a_report_is_a_table_of_tasks_checks_and_points():
    report = Report("00_start", RESULTS, "", "5eed", 1.26, "work/00.ipynb", "  (a note)")
    assert (report.earned, report.points) == (7, 10)
    assert report.table() == (
        "work/00.ipynb  (a note)\n\n  First\n   2/2  ok  It adds\n   0/3  --  It sends\n            bytes: too many\n"
        "\n  Second\n   5/5  ok  It waits\n\ntotal 7/10 in 1.3 s  (seed 5eed)"
    )
    assert "            | line 1\n            | line 2\n" in report.table(detail=True)
    bare = Report("00_start", [], "no seccomp", "s", 0.0)
    assert bare.table().splitlines()[0] == "00_start"
    assert bare.table().endswith("\na self-check, not a grade: answers ran without walls, because no seccomp")


CHAPTER_CELLS = [
    book.Cell("text", "", "## The task"),
    book.Cell("answer", "a", "### BEGIN SOLUTION\nx = 1\n### END SOLUTION\n"),
    book.Cell("check", "a-1", "# It is one", {"points": "1"}),
    book.Cell("check", "a-2", "# It is two", {"points": "2"}),
]


class Judged:
    missing = ""


def test_prove_names_what_is_wrong_with_a_chapter(monkeypatch):
    """Of grading that is played here: who gets points decides `verdicts`."""
    wrong = [
        book.Cell("wrong", "a", "w = 1", {"fails": "bytes", "why": "sends twice"}),
        book.Cell("wrong", "a", "w = 2", {"fails": "bytes", "why": "walks", "around": "import"}),
    ]
    monkeypatch.setattr(book.Chapter, "wrong", wrong)
    of = book.Chapter("07", book.Path("07_x.py"), CHAPTER_CELLS)
    seeds = []

    def failure_in(chapter, check, judge, code, limit_s, seed):
        seeds.append(seed)
        return verdicts.get((code.answer.strip(), check.name))

    monkeypatch.setattr(exercises, "failure_in", failure_in)
    solution, bytes_fail = of.tasks[0].answer.source.strip(), Failure("bytes", "m")
    stub = exercises.assignment.stub_of(of.tasks[0].answer.source).strip()
    attempted = {(stub, name): Failure(trial.NOT_ATTEMPTED) for name in ("a-1", "a-2")}
    caught = {("w = 1", "a-2"): bytes_fail, ("w = 2", "a-1"): bytes_fail, ("w = 2", "a-2"): bytes_fail}
    verdicts = attempted | caught
    few = "07: a has 2 wrong solutions; write three to twelve"
    assert exercises.prove(of, Judged, "9") == [few] and set(seeds) == {"9"}
    monkeypatch.setattr(book.Chapter, "wrong", [*wrong, *11 * wrong[:1]])
    assert exercises.prove(of, Judged) == [few.replace("2", "13")]
    monkeypatch.setattr(book.Chapter, "wrong", [*wrong, wrong[0]])
    assert exercises.prove(of, Judged) == []
    verdicts = attempted | caught | {(stub, "a-1"): Failure("no error", "x")}
    found = exercises.prove(of, Judged)
    assert found == [f"07: a stub gets 0 points, or another message than {trial.NOT_ATTEMPTED!r}"]
    verdicts = attempted | caught | {(stub, "a-2"): None}
    assert "07: a stub gets 2 points" in exercises.prove(of, Judged)[0]
    verdicts = attempted | caught | {(solution, "a-2"): Failure("sum", "m", "d")}
    assert exercises.prove(of, Judged) == ["07: the solution fails a-2: sum: m d"]
    verdicts = attempted | caught | {("w = 1", "a-1"): Failure("sum", "m")}
    # the first that fails speaks
    assert exercises.prove(of, Judged) == ["07: a, sends twice: found 'sum', not 'bytes'"] * 2
    verdicts = attempted | caught | {("w = 2", "a-2"): None}
    assert exercises.prove(of, Judged) == ["07: a, walks: earns 2 points"]
    verdicts = attempted
    assert exercises.prove(of, Judged)[:1] == ["07: a, sends twice: found 'nothing', not 'bytes'"]


def test_a_report_says_which_file_it_is_of_and_what_it_is_not(tmp_path, monkeypatch):
    of = book.chapter("00")
    for folder in ("exercises", "work/exercises"):
        (tmp_path / folder).mkdir(parents=True)
    ours, copy = tmp_path / "exercises" / of.student.name, tmp_path / "work/exercises" / of.student.name
    stub = exercises.assignment.notebooks(of)[of.student]
    edited = stub.replace("# YOUR CODE HERE", "# MY CODE HERE", 1)
    monkeypatch.setattr(book, "EXERCISES", tmp_path / "exercises")
    monkeypatch.setattr(exercises, "ROOT", tmp_path)
    monkeypatch.setattr(exercises, "written", lambda original: copy if copy.exists() else original)
    monkeypatch.setattr(book, "chapter", lambda number: of)
    graded = []

    def grade_answers(of, answers, judge, seed):
        graded.append((answers, seed))
        return Report("00", [], "", seed, 0.0)

    monkeypatch.setattr(exercises, "grade_answers", grade_answers)

    def said(path=None, judge=Judged, seed="5eed"):
        report = exercises.grade("00", path, judge=judge, seed=seed)
        return report.file, report.note

    ours.write_text(edited)
    assert said() == (f"exercises/{of.student.name}", "") and graded[-1][1] == "5eed"
    answers = graded[-1][0]
    assert sum("MY CODE" in text for text in answers.values()) == 1 and len(answers) > len(of.tasks)
    copy.write_text(stub)
    hint = f"  (answers in exercises/{of.student.name} are not graded; --file names it)"
    assert said() == (f"work/exercises/{of.student.name}", hint), "who has written into the wrong one is told"
    assert said(ours) == (f"exercises/{of.student.name}", "") and said(str(copy))[1] == hint
    ours.write_text(stub)
    assert said() == (f"work/exercises/{of.student.name}", "")
    changed = stub.replace('"points": 2', '"points": 3', 1)
    copy.write_text(changed.replace('"checksum": "', '"checksum": "0', 99))
    assert said()[1] == "  (its checks are not those of this version: graded with this version's)"
    elsewhere = tmp_path.parent / f"{tmp_path.name}.ipynb"
    elsewhere.write_text(stub)
    assert said(elsewhere) == (str(elsewhere), "")


def test_attack_tells_who_earned_something(monkeypatch):
    of = book.Chapter("07", book.Path("07_x.py"), CHAPTER_CELLS)
    attempts = [
        book.Cell("wrong", "any", f"# {n}", {"body": "return 1", "why": f"way {n}"}) for n in range(3)
    ]
    monkeypatch.setattr(book, "read_cells", lambda path: attempts)
    monkeypatch.setattr(exercises.pkgutil, "walk_packages", lambda *_: [])
    seen = []

    def failure_in(chapter, check, judge, code, limit_s, seed):
        seen.append((code.answer.splitlines()[-1], seed))
        return None if (code.answer.endswith("# 1"), check.name) == (True, "a-2") else Failure("p")

    monkeypatch.setattr(exercises, "failure_in", failure_in)
    assert exercises.attack(of, Judged, "4") == (3, ["07: a, way 1: earns 2 points"])
    assert seen == [(f"# {n}", "4") for n in range(3) for _ in range(2)]
