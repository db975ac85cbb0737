"""A real browser: Chromium, driven by Playwright."""
