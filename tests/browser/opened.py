"""Page of a browser whose console has to stay silent, and which asks nobody but its own server."""

PHONE, DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 900}


class opened:
    """Context manager: a new page at an address; fails if the page logs, asks another server or opens a dialog."""

    def __init__(self, browser, address: str, size: dict[str, int], **options: str) -> None:
        self.context, self.address = browser.new_context(viewport=size, **options), address
        self.said: list[str] = []

    def __enter__(self):
        page = self.context.new_page()
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: (self.said.append("a dialog"), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith((self.address, "data:", "blob:"))
                or self.said.append(f"asks {request.url}"))
        page.goto(self.address)
        return page

    def __exit__(self, kind, *_) -> None:
        self.context.close()
        assert kind or self.said == []


def overflow(page) -> int:
    """Pixels by which a page is wider than its screen."""
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")
