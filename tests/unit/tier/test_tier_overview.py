"""What is said of a tier: who owns what, what is on its way, and which machines are reached."""

from rich.console import Console

from proxy.admin.commands.asking_commands import tier_tables
from proxy.relay.steering import MemberAddresses
from proxy.tier.group.group_documents import AnnouncedMember, Assignment
from proxy.tier.slot_balance import SlotLoad
from proxy.tier.slot_map import SlotMap
from proxy.tier.tier_member import tier_overview

MEMBERS = {name: MemberAddresses(name, {}) for name in ("a/0", "b/0")}
ASSIGNMENT = Assignment(
    7,
    SlotMap(MEMBERS, ["a/0", "a/0", None, "a/0"]),
    releasing={2: "a/0"},
    members={
        name: AnnouncedMember(f"http://{name}:9644", "p", "9f2c64d1", 0) for name in ("a/0", "b/0")
    },
    targets={2: "b/0"},
    loads={0: SlotLoad(0.0, 0.25), 2: SlotLoad(0.0, 0.5), 3: SlotLoad(0.0, 0.125)},
)


def test_it_says_who_owns_what_and_what_is_on_its_way() -> None:
    said = tier_overview("prod", "a/0", ASSIGNMENT, (), {})
    assert not said["settled"]
    a, b = said["members"]
    assert (a["slots"], a["owned"], a["releasing"], a["awaiting"]) == ([0, 1, 3], 3, 1, 0)
    assert (b["slots"], b["owned"], b["releasing"], b["awaiting"]) == ([], 0, 0, 1)
    assert (a["load"], b["load"]) == (0.375, None)


def test_it_says_which_machines_are_not_reached() -> None:
    said = tier_overview("prod", "a/0", ASSIGNMENT, {"b/0"}, {"b/0": "b:9092: no answer in 3 s"})
    assert [each["answers"] for each in said["machines"]] == [None, False]
    console = Console(width=120)
    with console.capture() as screen:
        console.print(tier_tables(said, 120))
    text = screen.get()
    assert "tier prod  generation 7  slots 4, 1 on their way" in text
    assert "38%" in text
    (line,) = (line for line in text.splitlines() if line.startswith("b/0 ") and "NO" in line)
    assert "b:9092: no answer in 3 s" in line
