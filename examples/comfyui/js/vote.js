// After a run `best` is 0 again, so that no vote counts for images that nobody has seen.
import { app } from "../../scripts/app.js";

app.registerExtension({
  name: "flowgrpo.vote",
  nodeCreated(node) {
    if (node.comfyClass !== "FlowgrpoVote") return;
    const shown = node.onExecuted;
    node.onExecuted = function (...given) {
      shown?.apply(this, given);
      const best = this.widgets?.find((widget) => widget.name === "best");
      if (best) best.value = 0;
    };
  },
});
