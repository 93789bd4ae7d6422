"""A clock that tests turn by hand."""


class FakeClock:
    def __init__(self, now_s=1000.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s

    def advance(self, seconds):
        self.now_s += seconds
