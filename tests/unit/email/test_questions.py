"""`kestrl email questions`: scripted, by a model behind a real HTTP endpoint, and imported; split by inbox."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console
from tests.fakes.chat_model import ScriptedChat

from kestrl._app.cli.main import main
from kestrl.data.rows import read_rows
from kestrl_email.mailbox.build import build_database
from kestrl_email.mailbox.corpus import write_maildir
from kestrl_email.mailbox.database import Filters, inboxes, open_database
from kestrl_email.mailbox.question_writer import WrittenList, reason_of
from kestrl_email.mailbox.questions import split_inboxes
from kestrl_email.mailbox.tools import ReadEmail, SearchEmails


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    write_maildir(folder / "maildir", 400, seed=1, people=8)
    build_database(
        [folder / "maildir"], folder / "mail.db", filters=Filters(), console=Console(file=StringIO()), workers=1
    )
    return folder / "mail.db"


def kestrl(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path, code: int = 0) -> None:
    monkeypatch.setattr(sys, "argv", ["kestrl", "email", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def inboxes_of(path: Path) -> set[str]:
    return {row["extra_info"]["inbox"] for row in rows(path)}


def test_scripted_questions_have_one_right_answer(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "q.jsonl"
    kestrl(monkeypatch, "questions", database, "--out", out, "--scripted", "--per-inbox", "60")
    kinds: dict[str, int] = {}
    for row in rows(out):
        expected, info = row["reward_model"]["ground_truth"], row["extra_info"]
        kinds[info["kind"]] = kinds.get(info["kind"], 0) + 1
        create = info["tools_kwargs"]["search_emails"]["create_kwargs"]
        assert info["inbox"] in row["prompt"][0]["content"]
        assert info["query_date"] in row["prompt"][0]["content"]
        with closing(SearchEmails(**create)) as search, closing(ReadEmail(**create)) as read:
            mails = [json.loads(read(message_id).text) for message_id in expected["message_ids"]]
            assert max(mail["date"] for mail in mails) < info["query_date"]
            sender = mails[0]["from"].split()[-1]
            if info["kind"] == "how_many":
                month = mails[0]["date"][:7]
                following = f"{int(month[:4]) + month.endswith('12')}-{int(month[5:]) % 12 + 1:02}"
                found = search(from_addr=sender, sent_after=f"{month}-01", sent_before=f"{following}-01")
                assert json.loads(found.text)["total"] == int(expected["answer"])
            elif info["kind"] == "first":
                found = json.loads(search(from_addr=sender, oldest_first=True, max_results=1).text)
                assert found["results"][0]["subject"] == expected["answer"]
            elif info["kind"] == "when":
                assert mails[0]["date"][:10] == expected["answer"]
                assert mails[0]["date"][:4] in expected["aliases"][0]
            else:
                assert sender == expected["answer"]
    assert set(kinds) == {"who", "when", "how_many", "first"}


def test_training_and_validation_have_different_inboxes(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "q.jsonl"
    arguments = ("questions", database, "--out", out, "--scripted", "--per-inbox", "5", "--inboxes", "6")
    kestrl(monkeypatch, *arguments)
    train, validation = inboxes_of(out), inboxes_of(tmp_path / "q.validation.jsonl")
    assert (len(train), len(validation)) == (4, 2)
    assert not train & validation
    assert "20 questions about 4 inboxes" in capsys.readouterr().out
    first = out.read_text()
    kestrl(monkeypatch, *arguments)
    assert out.read_text() == first
    assert len(list(read_rows(out))) == 20


@pytest.mark.parametrize(
    ("count", "share", "sizes"), [(1, 0.5, (1, 0)), (2, 0.1, (1, 1)), (28, 8 / 28, (20, 8)), (9, 0, (9, 0))]
)
def test_inboxes_are_split_exactly(count: int, share: float, sizes: tuple[int, int]):
    addresses = [f"p{n}@x.example" for n in range(count)]
    train, validation = split_inboxes(addresses, share)
    assert (len(train), len(validation)) == sizes
    assert split_inboxes(addresses[::-1], share) == (train, validation)


def written(request: Any) -> dict[str, Any]:
    """A model that asks about the first mail, and about one that it invents."""
    shown = json.loads(request["messages"][1]["content"].removeprefix("<mails>").removesuffix("</mails>"))
    item = {"answer": "Oslo", "aliases": [], "evidence": "any", "how_realistic": 0.8}
    questions = [
        {**item, "question": f"Where is {shown[0]['subject']}?", "message_ids": [shown[0]["message_id"]]},
        {**item, "question": "What was never written?", "message_ids": ["<invented@x>"]},
    ]
    return {"content": json.dumps({"questions": questions})}


def by_model(chat: ScriptedChat, database: Path, out: Path) -> tuple[str | Path, ...]:
    return (
        *("questions", database, "--out", out, "--model", "writer", "--endpoint", chat.url, "--inboxes", "3"),
        *("--per-inbox", "10", "--api-key-env", "WRITER_KEY"),
    )


def test_a_model_writes_questions_which_are_checked_and_kept(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WRITER_KEY", "secret-key")
    out = tmp_path / "q.jsonl"
    with ScriptedChat(written) as chat:
        kestrl(monkeypatch, *by_model(chat, database, out))
        assert len(rows(out)) == 4
        assert chat.keys == {"Bearer secret-key"}
        assert len(chat.requests) == 6
        assert chat.requests[0]["response_format"]["type"] == "json_schema"
        shown = chat.requests[0]["messages"][1]["content"]
        assert shown.count("<") == 2, "no mail can end the list of mails"
        printed = capsys.readouterr().err
        assert "6 requests (0 kept), 600 + 60 tokens, 0 repaired, 6 without evidence" in printed
        assert "  6 names a mail that was not shown\n" in printed
        refused = rows(tmp_path / ".q.jsonl.answers" / "refused.jsonl")
        assert (len(refused), {each["problem"] for each in refused}) == (6, {"<invented@x>"})
        kestrl(monkeypatch, *by_model(chat, database, out))
        assert len(chat.requests) == 6, "nothing is asked twice"
        assert rows(tmp_path / ".q.jsonl.answers" / "refused.jsonl") == refused
    assert all(row["reward_model"]["ground_truth"]["answer"] == "Oslo" for row in rows(out))


def test_an_invalid_answer_is_repaired_or_left_out(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WRITER_KEY", "x")
    first: set[str] = set()

    def careless(request: Any) -> dict[str, Any]:
        mails = request["messages"][1]["content"]
        if len(request["messages"]) == 2 and mails not in first:
            first.add(mails)
            return {"content": "Sure! Here are your questions."}
        return written(request)

    with ScriptedChat(careless) as chat:
        kestrl(monkeypatch, *by_model(chat, database, tmp_path / "q.jsonl"))
        repairs = [request for request in chat.requests if len(request["messages"]) == 4]
    assert len(repairs) == 6
    assert "does not fit the schema" in repairs[0]["messages"][3]["content"]
    assert len(rows(tmp_path / "q.jsonl")) == 4
    capsys.readouterr()
    with ScriptedChat(lambda _request: {"content": "no"}) as chat:
        kestrl(monkeypatch, *by_model(chat, database, tmp_path / "r.jsonl"))
    printed = capsys.readouterr().err
    assert "no valid answer in 3 attempts" in printed
    assert "  18 is no JSON\n" in printed
    log = tmp_path / ".r.jsonl.answers" / "refused.jsonl"
    assert printed.splitlines()[-1] == f"each with the reply: {log}"
    assert [each["reply"] for each in rows(log)] == ["no"] * 18
    assert rows(tmp_path / "r.jsonl") == []


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("no", "is no JSON"),
        ("[]", "reply: model type"),
        ('{"questions": [{}]}', "questions.question: missing"),
        ('{"questions": [], "more": 1}', "more: extra forbidden"),
    ],
)
def test_a_reason_does_not_depend_on_the_place(reply: str, reason: str) -> None:
    with pytest.raises(ValidationError) as refused:
        WrittenList.model_validate_json(reply)
    assert reason_of(refused.value) == reason


def test_an_endpoint_that_refuses_ends_the_command_with_its_reason(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WRITER_KEY", "x")
    with ScriptedChat(lambda _request: 401) as chat:
        kestrl(monkeypatch, *by_model(chat, database, tmp_path / "q.jsonl"), code=1)
    assert "writer: HTTP 401" in capsys.readouterr().err
    monkeypatch.delenv("WRITER_KEY")
    kestrl(monkeypatch, *by_model(chat, database, tmp_path / "q.jsonl"), code=2)
    kestrl(monkeypatch, "questions", database, "--out", tmp_path / "q.jsonl", code=2)
    assert "name one source of questions" in capsys.readouterr().err
    assert not (tmp_path / "q.jsonl").exists()


def test_rows_name_a_database_by_address_and_digest(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out, uri = tmp_path / "q.jsonl", "s3://bucket/mail/mail.db"
    scripted = ("questions", database, "--out", out, "--scripted", "--per-inbox", "1")
    kestrl(monkeypatch, *scripted, "--database-uri", uri)
    pinned = f"{uri}#sha256={hashlib.sha256(database.read_bytes()).hexdigest()}"
    size = -(-database.stat().st_size // 2**20)
    assert f'data.files: [{{uri: "{pinned}", size: {size}Mi}}]' in capsys.readouterr().out
    named = {row["extra_info"]["tools_kwargs"]["read_email"]["create_kwargs"]["database"] for row in rows(out)}
    assert named == {pinned}
    kestrl(monkeypatch, *scripted, "--database-uri", "mail.db", code=2)
    assert "--database-uri: 'mail.db' is not of the form s3://BUCKET/PATH" in capsys.readouterr().err


def test_questions_of_art_e_are_imported_where_their_mails_are(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with closing(open_database(database)) as connection:
        inbox = inboxes(connection)[0][0]
        query = "SELECT message_id FROM emails WHERE from_address = ? LIMIT 1"
        (message_id,) = connection.execute(query, (inbox,)).fetchone()
    item = {"id": 3, "question": "Where?", "answer": "Oslo", "message_ids": [message_id], "how_realistic": 0.9}
    item |= {"inbox_address": inbox.upper(), "query_date": "2001-05-20"}
    source = tmp_path / "art.jsonl"
    source.write_text("\n".join(json.dumps(each) for each in (item, {**item, "message_ids": ["<gone@x>"]})))
    kestrl(monkeypatch, "questions", database, "--out", tmp_path / "q.jsonl", "--import", source)
    (row,) = rows(tmp_path / "q.jsonl")
    assert row["reward_model"]["ground_truth"]["message_ids"] == [message_id]
    assert row["extra_info"]["how_realistic"] == 0.9
    assert "left out 1 questions" in capsys.readouterr().err
    source.write_text('{"question": "?"}')
    kestrl(monkeypatch, "questions", database, "--out", tmp_path / "q.jsonl", "--import", source, code=2)
    assert "art.jsonl:1: not a question in ART-E's format" in capsys.readouterr().err
