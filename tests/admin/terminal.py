"""`quota-proxy top` in a terminal of a given width, for what it draws there."""

import asyncio
from io import StringIO

from rich.console import Console

from proxy.admin.commands.asking_commands import AdminPortClient, run_top


async def run_once(url: str, width: int) -> str:
    """Let it draw once; return that, without colours."""
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    await asyncio.to_thread(run_top, AdminPortClient(url), once=True, console=console)
    return out.getvalue()
