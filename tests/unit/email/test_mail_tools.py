"""The tools on real mail: scope, snippets, pages, order, listing, parts, copies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kestrl.errors import UserInputError
from kestrl.testing.attempts import make_attempt, make_call
from kestrl.tools import ToolError
from kestrl.tools.arguments import ArgumentsInvalid
from kestrl.tools.schema import read
from kestrl_email.mailbox.build import build_database
from kestrl_email.mailbox.database import Filters
from kestrl_email.mailbox.tools import PART, ReadEmail, ReturnFinalAnswer, SearchEmails, parts
from kestrl_email.rewards import art_e

ME, ANNA, BORIS = "me@x.example", "anna@x.example", "boris@x.example"
LONG = "\n".join(f"line {number} of a long report" for number in range(600))


def row(number: int, sender: str, to: list[str], date: str, subject: str, body: str) -> dict[str, Any]:
    return {"message_id": f"<{number}@x>", "from": sender, "to": to, "date": date, "subject": subject, "body": body}


ROWS = [
    row(
        1,
        ANNA,
        [ME, BORIS],
        "2001-01-10",
        "Budget",
        "The budget is 100% final; see contract(2). " + "word " * 40 + "zebra",
    ),
    row(2, ANNA, [ME], "2001-02-10", "Offsite", "We meet on Monday."),
    row(3, BORIS, [ME], "2001-03-10", "Re: Budget", "Contract attached for the budget."),
    row(4, ME, [ANNA], "2001-04-10", "Thanks", "I owe you a budget."),
    row(5, ANNA, [BORIS], "2001-05-10", "Secret budget", "Nothing for me."),
    row(6, BORIS, [ME], "", "Undated", "A budget without a day."),
    row(7, BORIS, [ME], "2001-06-10", "Report", LONG),
    row(8, BORIS, [ME, ANNA], "2001-03-10", "Re: Budget", "Contract attached for the  budget."),
    *(row(100 + n, "news@x.example", [ME], f"2002-01-{n:02}", f"News {n}", "weekly news") for n in range(1, 26)),
]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tools") / "a ?#%41 b"
    folder.mkdir()
    source = folder / "mails.jsonl"
    source.write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    built = build_database([source], folder / "mail.db", filters=Filters(), console=Console(file=StringIO()))
    assert built.added == {"mail": len(ROWS) - 1, "duplicate": 1}
    return str(folder / "mail.db")


@pytest.fixture
def search(database: str) -> Iterator[SearchEmails]:
    with closing(SearchEmails(database=database, inbox=ME)) as tool:
        yield tool


@pytest.fixture
def read_email(database: str) -> Iterator[ReadEmail]:
    with closing(ReadEmail(database=database, inbox=ME)) as tool:
        yield tool


def numbers(tool: SearchEmails, *arguments: Any, **options: Any) -> list[int]:
    result = tool(*arguments, **options)
    found = [item["message_id"] for item in json.loads(result.text)["results"]]
    assert found == result.data["found"]
    return [int(message_id[1:-3]) for message_id in found]


def test_all_keywords_must_occur_newest_first_and_undated_last(search: SearchEmails):
    assert numbers(search, ["budget"]) == [4, 3, 1, 6]
    assert numbers(search, ["budget"], oldest_first=True) == [1, 3, 4, 6]
    assert numbers(search, ["BUDGET", "contract"]) == [3, 1]
    assert numbers(search, ["contract(2)"]) == [1]
    assert numbers(search, ["anna@x.example", "monday"]) == [2]


def test_a_search_stays_in_its_inbox(search: SearchEmails, database: str):
    assert numbers(search, ["secret"]) == []
    with closing(SearchEmails(database=database, inbox=BORIS.upper())) as his:
        assert numbers(his, ["secret"]) == [5]
    assert numbers(search, ["inbox1"]) == []  # a token of the index is not a word


def test_the_snippet_shows_the_match(search: SearchEmails):
    (found,) = json.loads(search(["zebra"]).text)["results"]
    assert found["snippet"].endswith("word <b>zebra</b>")
    assert found["snippet"].startswith("... word")
    assert {name: found[name] for name in ("date", "from", "subject")} == {
        "date": "2001-01-10 00:00",
        "from": ANNA,
        "subject": "Budget",
    }


def test_count_and_earliest_questions_can_be_answered(search: SearchEmails):
    first = json.loads(search(oldest_first=True, from_addr="News@X.example", max_results=1).text)
    assert first["total"] == 25
    assert first["results"][0]["message_id"] == "<101@x>"
    assert json.loads(search(["budget"], sent_before="2001-04-10").text)["total"] == 2
    assert json.loads(search().text)["total"] == len(ROWS) - 2


def test_pages_list_everything_once(search: SearchEmails):
    pages = [numbers(search, ["weekly"], page=page) for page in (1, 2, 3, 4)]
    assert [number for page in pages for number in page] == [100 + n for n in range(25, 0, -1)]
    assert numbers(search, ["weekly"], max_results=3, page=2) == [122, 121, 120]
    assert pages[3] == []


def test_filters_hold_with_and_without_keywords(search: SearchEmails):
    for keywords in (["budget"], []):
        assert set(numbers(search, keywords, from_addr=BORIS)) & {3, 6} == {3, 6}
        assert numbers(search, keywords, sent_after="2001-03-10", sent_before="2001-04-10") == [3]
        assert numbers(search, keywords, sent_after="2001-03-11", sent_before="2001-04-11") == [4]
        assert numbers(search, keywords, to_addr=ANNA) == [4, 3]  # 3 by its copy


@pytest.mark.parametrize("bound", ["sent_after", "sent_before"])
@pytest.mark.parametrize("value", ["yesterday", "2001-02-30", "2001/01/01", "", "'; DROP TABLE emails"])
def test_a_date_is_checked(search: SearchEmails, bound: str, value: str):
    with pytest.raises(ToolError, match=f"{bound} must be a date"):
        search(["budget"], **{bound: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("wrong", [{"max_results": -1}, {"max_results": 11}, {"page": 0}, {"page": 10**30}])
def test_limits_have_bounds(search: SearchEmails, wrong: dict[str, int]):
    with pytest.raises(ToolError, match="between 1 and"):
        search(["budget"], **wrong)  # pyright: ignore[reportArgumentType]


@given(words=st.lists(st.text(min_size=1, max_size=20), max_size=3))
def test_any_keywords_are_data(database: str, words: list[str]):
    with closing(SearchEmails(database=database, inbox=ME)) as tool:
        try:
            tool(words)
        except ToolError as error:
            assert "letters or digits" in str(error)  # noqa: PT017 - most words are valid


def test_the_schema_refuses_what_art_e_let_through():
    arguments = read(SearchEmails, "search_emails").arguments
    for wrong in (
        {"keywords": "contract"},
        {"max_results": -1},
        {"page": 0},
        {"inbox": BORIS},
        {"oldest_first": "yes"},
    ):
        with pytest.raises(ArgumentsInvalid):
            arguments.parse(wrong)
    assert arguments.parse({}) == {}


def test_a_mail_is_read_with_its_recipients(read_email: ReadEmail):
    mail = json.loads(read_email("<1@x>").text)
    assert (mail["from"], mail["to"], mail["date"]) == (ANNA, [BORIS, ME], "2001-01-10 00:00:00")
    assert "part" not in mail


def test_a_mail_of_another_inbox_is_not_read(read_email: ReadEmail):
    for wrong in ("<5@x>", "<99@x>", "", "a\ud800"):
        with pytest.raises(ToolError, match="no mail"):
            read_email(wrong)


def test_a_copys_id_names_the_mail(read_email: ReadEmail, database: str):
    assert read_email("<8@x>").data["read"] == "<3@x>"
    with closing(ReturnFinalAnswer(database=database, inbox=ME)) as answer:
        assert answer("x", ["<8@x>", "<5@x>", "nonsense"]).data["sources"] == ["<3@x>", "<5@x>", "nonsense"]


@pytest.mark.parametrize("cited", ["<3@x>", "<8@x>"], ids=["the mail that was kept", "its folded copy"])
@pytest.mark.parametrize("named", ["<3@x>", "<8@x>"])
def test_a_row_may_name_any_copy_of_a_mail(database: str, cited: str, named: str):
    """An agent that searches, reads and cites gets the full reward, whichever copy the row names and it cites."""
    with (
        closing(SearchEmails(database=database, inbox=ME)) as search,
        closing(ReadEmail(database=database, inbox=ME)) as read_email,
        closing(ReturnFinalAnswer(database=database, inbox=ME)) as answer,
    ):
        done = {
            "search_emails": search(["contract", "attached"]),
            "read_email": read_email(cited),
            "return_final_answer": answer("Attached", [cited]),
        }
    calls = [make_call(name, text=result.text, data=result.data) for name, result in done.items()]
    score = art_e(make_attempt(calls=calls, ground_truth={"answer": "attached", "message_ids": [named]}))
    assert score.metrics["sources_correct"] == score.metrics["answer_correct"] == 1.0
    assert (score.metrics["ever_found_right_email"], score.metrics["ever_read_right_email"]) == (1.0, 1.0)


def test_a_mail_without_copies_says_nothing_of_them(read_email: ReadEmail):
    assert "copies" not in read_email("<2@x>").data


def test_a_long_mail_comes_in_parts(read_email: ReadEmail):
    first = json.loads(read_email("<7@x>").text)
    assert first["part"] == 1
    bodies = [json.loads(read_email("<7@x>", part=n + 1).text)["body"] for n in range(first["parts"])]
    assert "".join(bodies) == LONG
    assert all(len(body) <= PART and body.startswith("line") for body in bodies)
    with pytest.raises(ToolError, match=f"has {first['parts']} parts; there is no part"):
        read_email("<7@x>", part=first["parts"] + 1)


@given(st.text(alphabet="ab\n", max_size=3000).map(lambda text: text * 7))
def test_parts_are_the_whole_body(body: str):
    pieces = parts(body)
    assert "".join(pieces) == body
    assert all(len(piece) <= PART for piece in pieces)


def test_an_inbox_without_mail_and_a_wrong_file_are_refused(database: str, tmp_path: Path):
    with pytest.raises(UserInputError, match="no mail in the inbox"):
        SearchEmails(database=database, inbox="nobody@x.example")
    with pytest.raises(UserInputError, match="does not exist"):
        SearchEmails(database=str(tmp_path / "none.db"), inbox=ME)
