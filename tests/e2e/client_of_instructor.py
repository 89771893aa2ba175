"""Instructor, in an environment of its own: URL MODEL PROMPT; fails if an answer is wrong."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

URL, MODEL, PROMPT = sys.argv[1:]


class Paint(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "green"]


client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    paint = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        response_model=Paint,
        max_retries=0,
        max_tokens=160,
    )
    assert isinstance(paint, Paint), paint
