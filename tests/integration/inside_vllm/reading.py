"""What vLLM's own parsers read in texts: `python reading.py TEXTS ANSWERS`, in the interpreter that has vLLM.

TEXTS has the tokenizer of each kind, pairs of kind and text, the tools' schemas, and the names of vLLM's parsers.
ANSWERS gets the content, the calls and why it cannot be read here, for each text; and by kind, whether the parser of
that name is the one that was asked.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser
from vllm.tool_parsers.mistral_tool_parser import MistralToolParser
from vllm.tool_parsers.pythonic_tool_parser import PythonicToolParser
from vllm.tool_parsers.qwen3_engine_tool_parser import Qwen3EngineToolParser

COMPARED: dict[str, Any] = {
    "hermes": Hermes2ProToolParser,
    "llama3_json": Llama3JsonToolParser,
    "mistral": MistralToolParser,
    "mistral, before v11": MistralToolParser,
    "qwen_xml": Qwen3EngineToolParser,
    "pythonic": PythonicToolParser,
}
Answer = tuple[str, list[tuple[str, Any]], str]


def read(kind: str, tokenizer: PreTrainedTokenizerFast, text: str, schemas: dict[str, Any]) -> Answer:
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()]
    request = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "auto"}
    )
    extracted = COMPARED[kind](tokenizer, request.tools).extract_tool_calls(text, request)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in extracted.tool_calls or ()]
    return (extracted.content or "").strip(), calls, ""


def read_harmony(text: str) -> Answer:
    """By OpenAI's own reader of harmony, which vLLM uses."""
    harmony: Any = importlib.import_module("openai_harmony")
    try:
        encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as error:  # its vocabulary is downloaded when it is first used
        if "vocab" not in str(error).lower() and "download" not in str(error).lower():
            raise
        return "", [], f"harmony's vocabulary is not here: {error}"
    ids = encoding.encode(text, allowed_special="all")
    messages = encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT)
    calls = [
        (message.recipient.removeprefix("functions."), json.loads(message.content[0].text))
        for message in messages
        if message.recipient
    ]
    content = [
        message.content[0].text for message in messages if not message.recipient and message.channel != "analysis"
    ]
    return "\n".join(content), calls, ""


def main(texts: Path, answers: Path) -> None:
    asked = json.loads(texts.read_text())
    tokenizers = {
        kind: PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer)),
            eos_token="<eos>",
            clean_up_tokenization_spaces=False,
        )
        for kind, tokenizer in asked["tokenizers"].items()
    }
    reads = [
        read_harmony(text) if kind == "harmony" else read(kind, tokenizers[kind], text, asked["schemas"])
        for kind, text in asked["texts"]
    ]
    served = {kind: ToolParserManager.get_tool_parser(name) for kind, name in asked["parsers"].items()}
    compared = {kind: served[kind] is COMPARED[kind] for kind in served.keys() & COMPARED.keys()}
    answers.write_text(json.dumps({"reads": reads, "compared": compared}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
