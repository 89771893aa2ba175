"""OpenAI's and vLLM's fields for structured output.

The *form* of an output is what the output must match: a JSON schema, any JSON object, a regex, one
of several texts, or a grammar.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from contract.errors import InvalidArgumentError
from contract.sampling import StructuredOutput
from router.http.strict_json import Listed, Schema

JsonSchema = dict[str, Any] | bool
"""A JSON schema, as a JSON value."""


class NamedSchema(Schema):
    """`json_schema` in OpenAI's `response_format`; only its field `schema` has an effect."""

    name: str = ""
    description: str = ""
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    strict: bool = True
    """Ignored: every schema is followed strictly."""


class ResponseFormat(Schema):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def forms(self) -> list[StructuredOutput]:
        """Return a list with the form; an empty list for text.

        Raises InvalidArgumentError if `json_schema` is missing.
        """
        match self.type:
            case "text":
                return []
            case "json_object":
                return [StructuredOutput(json_object=True)]
        if self.json_schema is None:
            raise InvalidArgumentError(
                "response_format.json_schema", 'is not set; with type "json_schema" it must be set'
            )
        return [_json_schema(self.json_schema.schema_)]


class StructuredOutputs(Schema):
    """vLLM's `structured_outputs`."""

    json_: Annotated[JsonSchema | str | None, Field(alias="json")] = None
    json_object: bool = False
    regex: str | None = None
    choice: Listed[str] | None = None
    grammar: str | None = None

    def forms(self) -> list[StructuredOutput]:
        """Return the forms that are set."""
        forms = []
        if self.json_ is not None:
            forms.append(_json_schema(self.json_))
        if self.json_object:
            forms.append(StructuredOutput(json_object=True))
        if self.regex is not None:
            forms.append(StructuredOutput(regex=self.regex))
        if self.choice is not None:
            forms.append(StructuredOutput(choice=tuple(self.choice)))
        if self.grammar is not None:
            forms.append(StructuredOutput(grammar=self.grammar))
        return forms


class StructuredFields(Schema):
    """A body's fields for structured output; OpenAI has one notation and vLLM two."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None

    def structured(self) -> StructuredOutput | None:
        """Return the form; None: free text. Raises InvalidArgumentError if two forms are set."""
        guided = StructuredOutputs.model_construct(
            json_=self.guided_json,
            json_object=False,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        forms = guided.forms()
        for part in (self.response_format, self.structured_outputs):
            if part is not None:
                forms += part.forms()
        if len(forms) > 1:
            raise InvalidArgumentError(
                "structured_outputs",
                f"asks for {' and '.join(form.form for form in forms)}, together with"
                " response_format and the guided_* fields; an output can have only one form",
            )
        return forms[0] if forms else None

    @property
    def structured_field_to_json(self) -> Mapping[str, str]:
        """Maps each kind of form, such as "structured.regex", to the JSON field for this kind."""
        if self.response_format is not None and self.response_format.type != "text":
            return {"structured.json_schema": "response_format.json_schema.schema"}
        is_nested = self.structured_outputs is not None and self.structured_outputs.forms()
        prefix = "structured_outputs." if is_nested else "guided_"
        kinds = {"json_schema": "json", "json_object": "json_object", "regex": "regex"}
        kinds |= {"choice": "choice", "grammar": "grammar"}
        return {f"structured.{form}": prefix + name for form, name in kinds.items()}


def _json_schema(schema: JsonSchema | str) -> StructuredOutput:
    # An object is serialized later, in the thread that makes the grammar.
    return StructuredOutput(json_schema=json.dumps(schema) if isinstance(schema, bool) else schema)
