"""What a router process is told."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from rpc.settings import Port, ProcessSettings


class RouterSettings(ProcessSettings):
    """A router's flags and environment variables."""

    model: Path
    """Hugging Face model directory: its tokenizer and its chat template are read."""
    served_model_name: str = ""
    """The name that requests use; empty: the directory's name."""
    scheduler: str = "127.0.0.1:50052"
    """The scheduler: host:port, or unix:/path."""
    http_port: Port = 8000
    """Port of HTTP, with OpenAI's API; 0 picks a free one."""
    grpc_port: Port = 50051
    """Port of gRPC; 0 picks a free one."""
    max_live_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Most requests at once, running, waiting or not yet read to their end."""
    tokenizer_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads that turn text into tokens."""

    @field_validator("model")
    @classmethod
    def _model_is_readable(cls, model: Path) -> Path:
        if not (model / "tokenizer.json").is_file():
            raise ValueError("it must be a directory with a tokenizer.json")
        return model

    @property
    def model_name(self) -> str:
        """The name that requests use."""
        return self.served_model_name or self.model.resolve().name
