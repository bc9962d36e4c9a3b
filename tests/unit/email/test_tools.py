"""The e-mail tools: the contracts of ART-E, and none of the published defects."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl.tools import ToolError, ToolResult
from kestrl.tools.arguments import ArgumentsInvalid
from kestrl.tools.schema import read
from kestrl_email.tools import ReadEmail, ReturnFinalAnswer, SearchEmails
from kestrl_email.world import OWNER, Mail, Split, Task, make_tasks, write_database

MINE = "mine"
MAILS = [
    ("m1", "2025-01-10", "Anna", "budget", "The budget is 100% final; see contract(2) for 'terms'."),
    ("m2", "2025-02-10", "Anna", "offsite", "We meet on Monday."),
    ("m3", "2025-03-10", "Boris", "budget", "Contract attached."),
]


def mail(inbox: str, message_id: str, date: str, sender: str, subject: str, body: str) -> Mail:
    return Mail(inbox=inbox, message_id=message_id, date=date, sender=sender, subject=subject, body=body, facts={})


def task(inbox: str, mails: list[Mail]) -> Task:
    return Task(id=inbox, inbox=inbox, person="", topic="", attribute="day", question="", mails=tuple(mails))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    # A folder whose name would end a URI early if it were not quoted.
    folder = tmp_path_factory.mktemp("tools") / "a ?#%41 b"
    folder.mkdir()
    path = folder / "mails.db"
    many = [mail("many", f"m{n}", f"2025-01-{n:02}", "Carl", "weekly", "news") for n in range(1, 16)]
    theirs = [mail("theirs", "m9", "2025-01-01", "Zoe", "budget", "A secret."), *many]
    write_database(path, [task(MINE, [mail(MINE, *fields) for fields in MAILS]), task("theirs", theirs)])
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO recipients SELECT id, 'dora@acme.example', 'cc' FROM emails WHERE inbox = ? AND message_id "
            "= 'm3'",
            (MINE,),
        )
    return str(path)


@pytest.fixture
def search(database: str) -> Iterator[SearchEmails]:
    tool = SearchEmails(database=database, inbox=MINE)
    yield tool
    tool.close()


@pytest.fixture
def read_email(database: str) -> Iterator[ReadEmail]:
    tool = ReadEmail(database=database, inbox=MINE)
    yield tool
    tool.close()


def ids(result: ToolResult) -> list[str]:
    found = [item["message_id"] for item in json.loads(result.text)]
    assert found == result.data["found"]
    return found


def test_all_keywords_must_occur_newest_first(search: SearchEmails):
    assert ids(search(["budget"])) == ["m3", "m1"]
    assert ids(search(["anna", "BUDGET"])) == ["m1"]
    assert ids(search(["anna", "attached"])) == []
    assert json.loads(search(["attached"]).text) == [{"message_id": "m3", "snippet": "Boris: budget"}]


def test_a_search_stays_in_its_inbox(search: SearchEmails):
    assert ids(search(["secret"])) == []


def test_sender_and_recipient_filter(search: SearchEmails):
    assert ids(search(["budget"], from_addr="ANNA@acme.example")) == ["m1"]
    assert ids(search(["budget"], from_addr="anna")) == []
    assert ids(search(["budget"], to_addr=OWNER)) == ["m3", "m1"]
    assert ids(search(["budget"], to_addr="dora@acme.example")) == ["m3"]


def test_sent_after_includes_its_day_and_sent_before_does_not(search: SearchEmails):
    assert ids(search(["budget"], sent_after="2025-03-10")) == ["m3"]
    assert ids(search(["budget"], sent_before="2025-03-10")) == ["m1"]


@pytest.mark.parametrize("day", ["yesterday", "2025-02-30", "2025/01/01", "", "2025-1-1", "'; DROP TABLE emails"])
@pytest.mark.parametrize("bound", ["sent_after", "sent_before"])
def test_a_date_is_checked(search: SearchEmails, bound: str, day: str):
    with pytest.raises(ToolError, match=f"{bound} must be a date"):
        search(["budget"], **{bound: day})


@pytest.mark.parametrize("limit", [-1, 0, 11, 10**30])
def test_a_limit_has_bounds(search: SearchEmails, limit: int):
    with pytest.raises(ToolError, match="between 1 and 10"):
        search(["budget"], max_results=limit)


def test_a_limit_is_kept(database: str):
    with closing(SearchEmails(database=database, inbox="many")) as many:
        assert len(ids(many(["weekly"]))) == 10
        assert ids(many(["weekly"], max_results=2)) == ["m15", "m14"]


def test_a_string_is_not_a_list_of_keywords(search: SearchEmails):
    with pytest.raises(ToolError, match="list"):
        search("contract")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("keywords", [[], [""], ["budget", " "], ["\x00"], ["*"], ["🙂"]])
def test_keywords_without_letters_are_refused(search: SearchEmails, keywords: list[str]):
    with pytest.raises(ToolError, match="keyword"):
        search(keywords)


@pytest.mark.parametrize(
    "keyword",
    [
        "bud\x00get",
        'budget"',
        "budget*",
        "NEAR(budget)",
        "subject:budget",
        "^budget",
        "budget OR anna",
        "-budget",
        "{budget}",
        "\ud800budget",
    ],
)
def test_full_text_syntax_and_control_characters_are_data(search: SearchEmails, keyword: str):
    assert set(ids(search([keyword]))) <= {"m1", "m3"}


def test_nul_bytes_are_left_out(search: SearchEmails):
    assert ids(search(["bud\x00get"])) == ["m3", "m1"]


@given(
    st.lists(st.text(max_size=12) | st.text(st.characters(categories=["Cs", "Cc", "P", "S"]), max_size=6), max_size=3),
    st.text(max_size=12),
)
def test_no_text_breaks_the_tools(database: str, keywords: list[str], text: str):
    with (
        closing(SearchEmails(database=database, inbox=MINE)) as tool,
        closing(ReadEmail(database=database, inbox=MINE)) as reader,
    ):
        for attempt in (
            lambda: tool(keywords),
            lambda: tool(["budget"], from_addr=text, to_addr=text),
            lambda: tool(["budget"], sent_after=text),
            lambda: reader(text),
        ):
            try:
                attempt().text.encode()
            except ToolError as error:
                str(error).encode()


def test_a_mail_is_read_whole_with_its_recipients(read_email: ReadEmail):
    result = read_email("m3")
    assert json.loads(result.text) == {
        "message_id": "m3",
        "date": "2025-03-10",
        "from_address": "Boris@acme.example",
        "to_addresses": [OWNER],
        "cc_addresses": ["dora@acme.example"],
        "subject": "budget",
        "body": "Contract attached.",
    }
    assert result.data == {"read": "m3"}
    assert not result.final


@pytest.mark.parametrize("message_id", ["m9", "m4", "", "%", "m1' OR 1=1 --", "m1\x00", "\ud800"])
def test_reading_is_scoped_to_the_inbox_and_exact(read_email: ReadEmail, message_id: str):
    with pytest.raises(ToolError, match="in this mailbox"):
        read_email(message_id)


def test_the_database_cannot_be_written_through_a_tool(search: SearchEmails):
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        search._connection.execute("DELETE FROM emails")  # pyright: ignore[reportPrivateUsage]


def test_a_missing_database_is_a_tool_failure_and_is_not_created(tmp_path: Path):
    with pytest.raises(sqlite3.OperationalError):
        SearchEmails(database=str(tmp_path / "none.db"), inbox=MINE)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_tool_holds_no_connection(database: str):
    tool = SearchEmails(database=database, inbox=MINE)
    tool.close()
    with pytest.raises(sqlite3.ProgrammingError):
        tool(["budget"])


def test_the_final_answer_ends_the_episode():
    result = ReturnFinalAnswer()("Monday", ["m2"])
    assert result.final
    assert result.data == {"answer": "Monday", "sources": ["m2"]}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "keywords"),
        ({"keywords": "contract"}, "keywords"),
        ({"keywords": []}, "keywords"),
        ({"keywords": [""]}, "keywords"),
        ({"keywords": [1]}, "keywords"),
        ({"keywords": ["a"], "max_results": -1}, "max_results"),
        ({"keywords": ["a"], "max_results": 11}, "max_results"),
        ({"keywords": ["a"], "max_results": "10"}, "max_results"),
        ({"keywords": ["a"], "inbox": "theirs"}, "inbox"),
    ],
)
def test_the_schema_refuses_it_before_the_tool_sees_it(arguments: dict[str, Any], complaint: str):
    with pytest.raises(ArgumentsInvalid, match=complaint):
        read(SearchEmails, "search_emails").arguments.parse(arguments)


@pytest.mark.parametrize(
    ("tool", "parameters", "required"),
    [
        (SearchEmails, ["keywords", "from_addr", "to_addr", "sent_after", "sent_before", "max_results"], ["keywords"]),
        (ReadEmail, ["message_id"], ["message_id"]),
        (ReturnFinalAnswer, ["answer", "sources"], ["answer", "sources"]),
    ],
)
def test_the_model_sees_its_own_parameters_only(tool: type, parameters: list[str], required: list[str]):
    schema = read(tool, "tool").schema
    assert list(schema.parameters["properties"]) == parameters
    assert schema.parameters["required"] == required
    assert schema.description
    assert all(described.get("description") for described in schema.parameters["properties"].values())


def test_a_search_of_the_demo_world_finds_the_right_mail(tmp_path: Path):
    tasks = list(make_tasks(Split.TRAIN, 10, 5))
    write_database(tmp_path / "world.db", tasks)
    for each in tasks:
        with closing(SearchEmails(database=str(tmp_path / "world.db"), inbox=each.inbox)) as tool:
            assert ids(tool([each.person, each.topic])) == [each.message_id]
            assert each.message_id in ids(tool([each.person]))
            assert len(ids(tool([each.topic]))) > 1
