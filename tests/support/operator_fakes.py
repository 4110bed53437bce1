"""Fakes for testing operators without Spark: a topology, a connection that drops all frames, and a coordinator."""

import stagecrew


class DroppingWire:
    """A connection to executors that drops all frames."""

    def send(self, executor, frame):
        pass

    def dirty(self, gateway):
        while gateway.take() is not None:
            pass

    def flush(self):
        pass


class FakeTopology:
    """A topology without Spark."""

    name = id = "load"
    is_active = True

    def streaming_query(self):
        """Returns None, because no streaming query is running."""

    def cancel_failed(self, cause):
        raise cause


class TextCoordinator(stagecrew.Coordinator):
    """A coordinator whose state is a string."""

    def __init__(self, context, instances):
        super().__init__(context)
        self.text = ""
        instances.append(self)

    def checkpoint(self, checkpoint_id):
        return self.text.encode()

    def reset_to_checkpoint(self, checkpoint_id, state):
        self.text = (state or b"").decode()
