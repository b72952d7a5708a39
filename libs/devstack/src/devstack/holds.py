"""The second half of the demonstration: units of a project are held, booked, expire, and one release is lost.

Everything goes over HTTP, as the people and programs do it; what must hold is checked at the end.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from devstack.seed import tenant
from devstack.stack import Stack

FLOORS: Final = 12
SECTIONS: Final = 4
UNITS_PER_FLOOR: Final = 5
BUYERS: Final = 20
GRACE: Final = 4
PATIENCE: Final = 40.0
OVERRIDES: Final = {
    "PIN_JOB_BOOKING_EXPIRATION_INTERVAL": "1",
    "PIN_JOB_PROPERTY_OBJECT_HOLD_EXPIRATION_INTERVAL": "1",
    "PIN_JOB_PROJECT_AGGREGATES_RECALC_INTERVAL": "1",
    "PIN_JOB_PROJECT_AGGREGATES_RECALC_DEBOUNCE": "PT1S",
    "PIN_HOLD_GRACE": f"PT{GRACE}S",
}
SIGNS: Final = {"Free": "[green]·[/]", "Reserved": "[yellow]R[/]", "Booked": "[cyan]B[/]", "Sold": "S", "Hidden": " "}
Check = Callable[[str, bool, object], None]


class Holds:
    """A project, its buyers, and what becomes of four of its units.

    Args:
        console: where it is told.
        stack: the running platform.
        check: prints and remembers a checked statement.
    """

    def __init__(self, console: Console, stack: Stack, check: Check) -> None:
        self._console, self._check = console, check
        issuer, mine = stack.issuer, tenant(0)
        self._log = stack.log_of("chessboard")
        self._crm = stack.client("crm", issuer.token(mine))
        self._board = stack.client("chessboard", issuer.token(mine, roles=["SALES_ADMIN"]))
        self._on_call = stack.client("crm", issuer.token(mine, subject="on-call", roles=["platform-admin"]))
        self._deal = self._project = ""

    def run(self) -> None:
        """Tell the story and check how it ends."""
        with self._crm, self._board, self._on_call:
            self._console.rule("[bold]7. A project on the chessboard[/], imported from CSV")
            self._deal = self._post(self._crm, "/v1/deals", {"title": "ЖК «Речной парк»"})["id"]
            units = self._import()
            self._print_grid("before")
            wanted, paid, slow, lost = units[7], units[31], units[58], units[104]
            self._console.rule(f"[bold]8. {BUYERS} buyers race[/] for unit {wanted['number']}")
            winner = self._race(wanted["id"])
            self._console.rule("[bold]9. One pays, one lets it expire, and one release is lost[/]")
            booked = self._book(paid["id"])
            expired = self._reserve(slow["id"], seconds=3)
            self._await_state(expired, "cancelled")
            self._console.print(f"  CRM let {slow['number']} go: its time was over (the normal path)", highlight=False)
            forgotten = self._lose(lost["id"])
            self._console.print(f"  the safety net let {lost['number']} go, and warned:", highlight=False)
            self._console.print_json(data=self._warning(lost["id"]))
            self._print_grid("after")
            self._console.rule("[bold]10. What must hold[/]")
            self._verify({wanted["id"]: winner, paid["id"]: booked}, {slow["id"]: expired, lost["id"]: forgotten})

    def _import(self) -> list[dict[str, Any]]:
        self._project = self._post(self._board, "/v1/projects", {"name": "Речной парк"})["id"]
        self._post(self._board, f"/v1/projects/{self._project}/buildings", {"name": "Корпус 1", "sections": SECTIONS})
        lines = ["building;section;number;floor;rooms;area;price"]
        for number in range(SECTIONS * FLOORS * UNITS_PER_FLOOR):
            section, rest = divmod(number, FLOORS * UNITS_PER_FLOOR)
            floor, place = divmod(rest, UNITS_PER_FLOOR)
            area = f"{32 + 9 * place},{floor % 10}"
            lines.append(f"Корпус 1;{section + 1};{number + 1};{floor + 1};{place % 4 + 1};{area};{9_500_000 + number}")
        answer = self._board.post(
            f"/v1/projects/{self._project}/imports",
            params={"currency": "RUB"},
            content="\n".join(lines).encode(),
            headers={"content-type": "text/csv"},
        )
        report = _answered(answer)
        self._console.print(f"  {report['created']} units of {report['lines']} lines", highlight=False)
        return sorted(self._cells(), key=lambda cell: int(cell["number"]))

    def _race(self, unit: str) -> str:
        """Let many ask for one unit at once; return the booking that has it."""
        bookings = [self._draft(unit) for _ in range(BUYERS)]
        with ThreadPoolExecutor(BUYERS) as pool:
            answers = list(pool.map(lambda one: self._ask_hold(one, 600), bookings))
        counts = Counter(answer.status_code for answer in answers)
        self._check("one buyer has the unit, the others are told so", counts == {202: 1, 409: BUYERS - 1}, dict(counts))
        winner = next(one for one, answer in zip(bookings, answers, strict=True) if answer.is_success)
        self._await_state(winner, "held")
        return winner

    def _book(self, unit: str) -> str:
        booking = self._reserve(unit, seconds=600)
        until = datetime.now(UTC) + timedelta(days=14)
        self._post(self._crm, f"/v1/bookings/{booking}/commit", {"bookedUntil": until.isoformat()})
        self._await_state(booking, "confirmed")
        return booking

    def _lose(self, unit: str) -> str:
        """Stop CRM's expiry, let a hold run out, and wait for the safety net; then let CRM go on."""
        job = "/v1/admin/jobs/booking-expiration"
        self._post(self._on_call, f"{job}/pause", {"reason": "the demonstration loses a release"})
        booking = self._reserve(unit, seconds=2)
        self._await("the safety net", lambda: self._status(unit) == "Free")
        self._await_state(booking, "cancelled")
        self._post(self._on_call, f"{job}/resume", None)
        return booking

    def _reserve(self, unit: str, seconds: float) -> str:
        booking = self._draft(unit)
        _answered(self._ask_hold(booking, seconds))
        self._await_state(booking, "held")
        return booking

    def _draft(self, unit: str) -> str:
        body = {"dealId": self._deal, "propertyObjectIds": [unit]}
        return str(self._post(self._crm, "/v1/bookings", body)["id"])

    def _ask_hold(self, booking: str, seconds: float) -> httpx.Response:
        until = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
        return self._crm.post(f"/v1/bookings/{booking}/reserve", json={"reservedUntil": until})

    def _verify(self, kept: dict[str, str], gone: dict[str, str]) -> None:
        for unit, status in zip(kept, ("Reserved", "Booked"), strict=True):
            self._check(f"the unit of a live booking is {status}", self._status(unit) == status, "")
        for booking in gone.values():
            found = _answered(self._crm.get(f"/v1/bookings/{booking}"))
            self._check("an expired booking says so", found["reason"] == "expired", found["state"])
        self._check("its unit is free again", all(self._status(unit) == "Free" for unit in gone), "")
        warned = [line["PropertyObjectId"] for line in self._warnings()]
        lost = list(gone)[-1]
        self._check("the safety net warned once, of the lost release only", warned == [lost], len(warned))
        states = {cell["id"]: cell.get("holdState") for cell in self._cells()}
        self._check("the grid says who freed it", states[lost] == "released_by_safety_net", states[lost])
        free = sum(cell["status"] == "Free" for cell in self._cells())

        def counted() -> int:
            found = _answered(self._board.get(f"/v1/projects/{self._project}"))
            return int(found["propertyObjectsFreeCount"])

        self._await("the recount", lambda: counted() == free)
        self._check("PropertyObjectsFreeCount equals a recount", counted() == free, free)

    def _warning(self, unit: str) -> dict[str, Any]:
        return next((line for line in self._warnings() if line["PropertyObjectId"] == unit), {})

    def _warnings(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if "lost CRM release" in line]
        return [line for line in lines if line["event"] == "lost CRM release"]

    def _status(self, unit: str) -> str:
        return str(_answered(self._board.get(f"/v1/property-objects/{unit}"))["status"])

    def _await_state(self, booking: str, state: str) -> None:
        def reached() -> bool:
            return bool(_answered(self._crm.get(f"/v1/bookings/{booking}"))["state"] == state)

        self._await(f"booking {state}", reached)

    def _await(self, what: str, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if time.monotonic() > deadline:
                self._check(f"{what} came in time", False, f"{PATIENCE:.0f} s")
                return
            time.sleep(0.1)

    def _cells(self) -> list[dict[str, Any]]:
        grid = _answered(self._board.get(f"/v1/projects/{self._project}/grid"))
        floors = [floor for building in grid["buildings"] for floor in building["floors"]]
        return [cell for floor in floors for section in floor["sections"] for cell in section["objects"]]

    def _print_grid(self, when: str) -> None:
        (building,) = _answered(self._board.get(f"/v1/projects/{self._project}/grid"))["buildings"]
        table = Table(
            title=f"Шахматка: {building['name']} ({when}; R reserved, B booked, f freed by the safety net)",
            title_justify="left",
        )
        for name in ("floor", *(f"section {number + 1}" for number in range(SECTIONS))):
            table.add_column(name)
        for floor in building["floors"]:
            by_section = {one["section"]: _row(one["objects"]) for one in floor["sections"]}
            table.add_row(str(floor["floor"]), *(by_section.get(number + 1, "") for number in range(SECTIONS)))
        self._console.print(table)

    @staticmethod
    def _post(client: httpx.Client, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        return _answered(client.post(path, json=body))


def _row(cells: Sequence[dict[str, Any]]) -> str:
    signs = [
        "[magenta]f[/]" if cell.get("holdState") == "released_by_safety_net" else SIGNS[cell["status"]]
        for cell in cells
    ]
    return " ".join(signs)


def _answered(answer: httpx.Response) -> dict[str, Any]:
    """Return the body of a success.

    Raises:
        RuntimeError: it is none; the text is the problem document.
    """
    if not answer.is_success:
        raise RuntimeError(f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.text}")
    body: dict[str, Any] = answer.json()
    return body
