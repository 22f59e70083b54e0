"""Pages that load nothing and run nothing, parsed."""

import html.parser

VOID = {"meta", "br", "img", "link"}


class Page(html.parser.HTMLParser):
    """Check that tags are balanced, collect ids, links, headings, and the text outside of styles."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open, self.ids, self.links, self.titles, self.text = [], [], [], [], ""
        self.feed(content)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base")
        self.open += [tag] if tag not in VOID else []
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            self.ids += [value] if name == "id" else []
            if name in ("href", "xlink:href", "src"):
                assert value.startswith("#"), value
                self.links.append(value[1:])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open = self.open[: len(self.open) - (tag not in VOID)]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "url(" not in data
            assert "@import" not in data
        else:
            self.text += data
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)
