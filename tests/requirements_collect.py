"""Pytest plugin that prints the requirement ids of every collected test; used by requirements_report.py."""

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print `REQ id nodeid` for each marker."""
    for item in session.items:
        for marker in item.iter_markers("req"):
            for name in marker.args:
                print(f"REQ {name} {item.nodeid.replace(' ', '_')}")
