"""The prompts of speculation.py: kinds whose answers repeat the prompt, free chat, and forms. All text is our own."""

import json
from pathlib import Path
from typing import Any

import yaml


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def _list(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}

FORMS: tuple[tuple[str, str], ...] = tuple(
    (question, json.dumps(schema))
    for question, schema in (
        (
            "Invent a person who rents a flat, as JSON.",
            _object(
                first_name=_text(20), family_name=_text(20), date_of_birth={"type": "string", "format": "date"},
                monthly_income=_NUMBER, employment_status={"enum": ["employed", "self-employed", "retired", "student"]},
                has_pets={"type": "boolean"},
            ),
        ),
        (
            "Invent an order of office supplies with three items, as JSON.",
            _object(
                order_number=_NUMBER, customer_name=_text(24), shipping_method={"enum": ["standard", "express"]},
                line_items=_list(_object(description=_text(24), quantity=_NUMBER, unit_price_cents=_NUMBER), 3, 3),
            ),
        ),
        (
            "Report a fault of a printer as JSON.",
            _object(
                error_category={"enum": ["paper jam", "no network", "empty cartridge", "unknown"]},
                severity_level={"enum": ["low", "medium", "high", "critical"]}, affected_device=_text(24),
                steps_to_reproduce=_list(_text(40), 2, 3), requires_technician={"type": "boolean"},
            ),
        ),
        (
            "Describe the weather of tomorrow in a town by the sea, as JSON.",
            _object(
                location=_object(latitude={"type": "number"}, longitude={"type": "number"}, town_name=_text(20)),
                temperature_celsius={"type": "integer", "minimum": -30, "maximum": 45},
                wind_direction={"enum": ["north", "east", "south", "west"]}, precipitation_millimetres=_NUMBER,
                weather_warning={"type": "boolean"},
            ),
        ),
        (
            "Give a recipe for pancakes as JSON.",
            _object(
                recipe_name=_text(24), preparation_minutes=_NUMBER, number_of_servings=_NUMBER,
                ingredients=_list(_object(ingredient_name=_text(20), amount_in_grams=_NUMBER), 3, 4),
                difficulty={"enum": ["easy", "moderate", "difficult"]},
            ),
        ),
        (
            "Plan a train journey from Vienna to Madrid with two changes, as JSON.",
            _object(
                departure_station=_text(20), arrival_station=_text(20),
                connections=_list(_object(change_at_station=_text(20), waiting_minutes=_NUMBER), 2, 2),
                ticket_class={"enum": ["first class", "second class"]}, total_price_cents=_NUMBER,
                seat_reservation_required={"type": "boolean"},
            ),
        ),
    )
)  # fmt: skip
"""Questions in a chat, each with the JSON schema that the answer must follow."""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _workloads() -> dict[str, tuple[str, ...]]:
    texts = yaml.safe_load(Path(__file__).with_name("speculation_prompts.yaml").read_text())
    return {
        "quotes": tuple(
            f"The text:\n\n{_one_line(text)}\n\nRepeat it word by word, with the most important sentence in bold."
            for text in texts["reports"]
        ),
        "edits": tuple(
            f"The program:\n\n```python\n{text}\n```\n\n"
            "The same program, with a comment in each function:\n\n```python\n"
            for text in texts["programs"]
        ),
        "json": tuple(
            f"The text:\n\n{_one_line(text)}\n\n"
            f"As JSON, one object in each line:\n\n{first}\n{first.partition(':')[0]}:"
            for first, text in ((record["first"], record["text"]) for record in texts["records"])
        ),
        "chat": tuple(texts["questions"]),
    }


WORKLOADS = _workloads()
"""Prompts by workload. Answers to all but `chat` repeat parts of the prompt, as far as the model does what is asked."""

CHATS = ("quotes", "chat")
"""Workloads that are asked for in a chat. The prompts of others are continued: a small model copies better so."""
