"""Foreign clients, each with the example of its own documentation: `foreign_clients.py NAME URL`.

Runs in an environment of the clients, without mmfast; prints `ok` and the version at the end.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
from typing import Any, Literal

URL = sys.argv[2] if len(sys.argv) > 2 else ""
MODEL, KEY = "mmfast-tiny-scenes", "sk-test"
os.environ |= {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": KEY}
os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
SAY = "Which way does the red circle move?"


def answer_model() -> Any:
    """What is extracted: names from a list, since a model of shapes ends no free text."""
    from pydantic import BaseModel, Field

    class UserInfo(BaseModel):
        name: Literal["John", "Ann"]
        age: int = Field(ge=0, le=99)

    return UserInfo


def openai_chat() -> None:
    from openai import OpenAI

    client = OpenAI()
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": SAY}],
    )
    assert completion.choices[0].message.content
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": SAY}], stream=True
    )
    said = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
    assert said
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "John is 25 years old."}],
        response_format=answer_model(),
    )
    assert 0 <= parsed.choices[0].message.parsed.age < 100


def openai_responses() -> None:
    from openai import OpenAI

    client = OpenAI()
    response = client.responses.create(model=MODEL, instructions="Be brief.", input=SAY)
    assert response.output_text and response.status == "completed"
    with client.responses.stream(model=MODEL, input=SAY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text == "".join(
        p.text for item in final.output if item.type == "message" for p in item.content
    )
    parsed = client.responses.parse(model=MODEL, input="John is 25.", text_format=answer_model())
    assert parsed.output_parsed.name in ("John", "Ann")


def openai_agents() -> None:
    from agents import Agent, OpenAIChatCompletionsModel, Runner
    from openai import AsyncOpenAI

    chat = OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI())
    for model in (chat, MODEL):  # a name takes /v1/responses
        agent = Agent(name="Assistant", instructions="You are a helpful assistant", model=model)
        assert Runner.run_sync(agent, SAY).final_output
    agent = Agent(name="Extractor", model=MODEL, output_type=answer_model())
    assert Runner.run_sync(agent, "John is 25.").final_output.name in ("John", "Ann")

    async def streamed() -> int:
        found = Runner.run_streamed(Agent(name="Joker", instructions="Be brief.", model=MODEL), SAY)
        kinds = [event.type async for event in found.stream_events()]
        assert found.final_output
        return kinds.count("raw_response_event")

    assert asyncio.run(streamed()) > 3


def langchain_openai() -> None:
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(model=MODEL)
    messages = [("system", "You are a helpful translator."), ("human", SAY)]
    assert llm.invoke(messages).content
    assert "".join(chunk.content for chunk in llm.stream(messages))
    for method in ("json_schema", "function_calling"):
        found = llm.with_structured_output(answer_model(), method=method).invoke("John is 25.")
        assert found.name in ("John", "Ann"), found


def litellm() -> None:
    import litellm

    messages = [{"role": "user", "content": SAY}]
    given: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": KEY, "messages": messages}
    found = litellm.completion(model=f"openai/{MODEL}", **given)
    assert found.choices[0].message.content
    parts = litellm.completion(model=f"openai/{MODEL}", stream=True, **given)
    assert "".join(part.choices[0].delta.content or "" for part in parts)
    form = answer_model()
    found = litellm.completion(model=f"openai/{MODEL}", response_format=form, **given)
    form.model_validate(json.loads(found.choices[0].message.content))


def instructor() -> None:
    import instructor
    from openai import OpenAI

    # Mode.JSON states no schema to the server, and a model of shapes writes no such object then
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(), mode=mode)
        user = client.chat.completions.create(
            model=MODEL,
            response_model=answer_model(),
            messages=[{"role": "user", "content": "John Doe is 30 years old."}],
        )
        assert user.name in ("John", "Ann")


def pydantic_ai() -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(MODEL), instructions="Be concise, reply with one sentence.")
        assert agent.run_sync(SAY).output
        for form in (answer_model(), NativeOutput(answer_model())):
            found = Agent(kind(MODEL), output_type=form).run_sync("John is 25.")
            assert found.output.name in ("John", "Ann")


CLIENTS = {
    "openai_chat": (openai_chat, "openai"),
    "openai_responses": (openai_responses, "openai"),
    "openai_agents": (openai_agents, "openai-agents"),
    "langchain_openai": (langchain_openai, "langchain-openai"),
    "litellm": (litellm, "litellm"),
    "instructor": (instructor, "instructor"),
    "pydantic_ai": (pydantic_ai, "pydantic-ai-slim"),
}

if __name__ == "__main__":
    run, package = CLIENTS[sys.argv[1]]
    run()
    print(f"ok {package} {importlib.metadata.version(package)}")
