"""Pages that load nothing and run nothing."""

import html
import re

TEXT_TAGS = {"h1", "h2", "h3", "p", "nav", "ul", "li", "a", "span", "b", "sup", "br", "section", "div"}
TABLE_TAGS = {"table", "thead", "tbody", "tr", "th", "td"}
TAGS = {"html", "head", "meta", "title", "body", "figure", "img", "figcaption", *TEXT_TAGS, *TABLE_TAGS}


def text_of(page: str) -> str:
    """Check that a page is one file without scripts and network access; return its text without the style."""
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    assert set(re.findall(r"<([a-z]\w*)", page)) <= TAGS
    assert not re.search(r"https?:|url\(|@import|srcset|<[^>]*\son\w+=", page)
    for target in re.findall(r'(?:href|src)="([^"]*)"', page):
        assert target.startswith(("#", "data:image/svg+xml;base64,"))
        assert not target.startswith("#") or f'id="{target[1:]}"' in page
    return html.unescape(re.sub(r"<[^>]+>", "", page))
