"""How each section of the status page looks in a real Chromium: at any width, light and dark."""

from pathlib import Path

import pytest
from chromium import CONTRAST, WIDE, Page
from status_page import SECTIONS, Section, visited

SHOTS = Path(__file__).parents[2] / "build" / "status-page"
WIDTHS = (320, 360, 768, 1440, 2560)
MIN_PICTURE_BYTES = 20_000
"""Below it there is nothing in a picture."""

pytestmark = pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS.keys())


async def test_it_fits_any_width_and_its_text_stands_out(page: Page, section: Section):
    await page.look(width=WIDTHS[0], height=900)
    async with visited(section.scene.server(), page) as url:
        await page.open(url, section.scene.shown)
        await section.unfold.take(page)
        for width in WIDTHS:
            await page.look(width=width, height=900)
            await page.until(f"innerWidth === {width}")
            wide = await page.run("document.documentElement.scrollWidth")
            assert wide <= width, width
        for dark, ground in ((False, "rgb(243, 245, 248)"), (True, "rgb(13, 19, 26)")):
            await page.look(**WIDE, dark=dark)
            await page.until(f"getComputedStyle(document.body).backgroundColor === '{ground}'")
            assert await page.run(CONTRAST) == [], f"dark: {dark}"


async def test_pictures_for_people(page: Page, section: Section):
    """Leaves pictures in build/status-page; `wide.png` is the one in the documents."""
    async with visited(section.pictured.server(), page) as url:
        for name, look in section.pictures.items():
            await page.look(**look)
            await page.open(url, section.pictured.shown)
            for step in section.before_picture:
                await step.take(page)
            await page.shoot(SHOTS / f"{name}.png")
            assert (SHOTS / f"{name}.png").stat().st_size > MIN_PICTURE_BYTES
