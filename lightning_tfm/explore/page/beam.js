// The beam as a tree.

import { numberField } from "./controls.js";
import { bar, html, number, percent, svg, table, visible } from "./dom.js";
import { boxedItems, clipped, liveFigure, liveLine, moveAmong, symbolWidth } from "./drawings.js";
import { pythonLines } from "./pictures.js";
import { questionPanel } from "./questions.js";
import { textArguments, vocabularyField } from "./state.js";

/** Maximum number of characters of a node. */
const MAX_NODE = 12;

/** Sizes of the tree, in units of the drawing. */
const NODE = { height: 20, font: 13, row: 25, gap: 22, top: 24, legend: 34 };

/** Width of a tree from which the outputs are below it. */
const MAX_BESIDE = 620;

/** Names of the states of a prefix. */
const STATUS = { open: "kept", finished: "finished", pruned: "pruned" };

/** Return the nodes of a beam by step, the most probable first, each with its place. */
function treeOf(nodes) {
  const placed = new Map(nodes.map((node) => [node.id, { ...node, children: [] }]));
  const steps = [];
  for (const node of placed.values()) {
    const parent = placed.get(node.parent);
    parent?.children.push(node);
    Object.assign(node, { parent, depth: parent ? parent.depth + 1 : 0 });
    (steps[node.depth] ??= []).push(node);
  }
  let left = 2;
  for (const step of steps) {
    step.sort((a, b) => a.rank - b.rank);
    const widths = step.map(({ symbol }) =>
      Math.max(NODE.height, symbolWidth(clipped(symbol, MAX_NODE), NODE.font) + 10));
    const width = Math.max(...widths);
    step.forEach((node, row) => {
      node.children.sort((a, b) => a.rank - b.rank);
      const y = NODE.top + row * NODE.row;
      Object.assign(node, { x: left + (width - widths[row]) / 2, y, width: widths[row], height: NODE.height });
    });
    left += width + NODE.gap;
  }
  const longest = Math.max(...steps.map((step) => step.length));
  return { placed, steps, width: left - NODE.gap + 2, height: NODE.top + longest * NODE.row + NODE.legend };
}

/** Return the nodes from the root, which is left out, to a node. */
function pathTo(node) {
  return node.parent ? [...pathTo(node.parent), node] : [];
}

/** Return the box of a node, whose shape is that of its status. */
function nodeBox({ x, y, width, height, status }) {
  const box = (name, inset, rx) => svg("rect", { class: name, x: x + inset, y: y + inset, width: width - 2 * inset,
    height: height - 2 * inset, rx });
  if (status === "finished") return [box("box", 0, height / 2), box("box inner", 2.5, height / 2 - 2.5)];
  return status === "open" ? box("box", 0, 4) : null;
}

function nodeElement(node, isBest, isForced) {
  const names = ["node", node.status, isBest && "best", isForced && "forced"].filter(Boolean).join(" ");
  const [x, y] = [node.x + node.width / 2, node.y + node.height / 2];
  if (!node.parent) return svg("circle", { class: "root", cx: x, cy: y, r: 4 });
  return svg("g", { class: names, "data-node": node.id }, nodeBox(node),
    svg("text", { class: "symbol", x, y, "dominant-baseline": "central" }, clipped(node.symbol, MAX_NODE)));
}

function edgeElement({ parent, x, y, log_probability: logProbability, status }, isBest) {
  const [from, to] = [parent.y + NODE.height / 2, y + NODE.height / 2];
  const start = parent.x + (parent.parent ? parent.width : parent.width / 2 + 4);
  const middle = (start + x) / 2;
  return svg("path", { class: `edge ${status}${isBest ? " best" : ""}`,
    d: `M${start} ${from}C${middle} ${from} ${middle} ${to} ${x} ${to}`,
    "stroke-width": status === "pruned" ? 1 : (1 + 3 * Math.exp(logProbability)).toFixed(2) });
}

/** Return the legend of the tree. */
function treeLegend(y) {
  let left = 2;
  return Object.entries({ ...STATUS, best: "best output" }).map(([status, label]) => {
    const node = { x: left, y: y - 8, width: 24, height: 16, status };
    const isLine = status === "best" || status === "pruned";
    const sample = isLine ? svg("path", { class: `edge ${status}`, d: `M${left} ${y}h24`,
      "stroke-width": status === "best" ? 3 : 1 }) : svg("g", { class: `node ${status}` }, nodeBox(node));
    left += 24 + 8 + 6.2 * label.length + 18;
    return [sample, svg("text", { class: "axis", x: node.x + 31, y, "dominant-baseline": "central" }, label)];
  });
}

/** Return the drawing of the beam as a tree. */
function treeDrawing(tree, best, prefix, key) {
  const bestIds = new Set(best.map(({ id }) => id));
  const isForced = (node) => node.depth > 0 && node.depth <= prefix.length
    && pathTo(node).every(({ token }, i) => token === prefix[i]);
  const nodes = tree.steps.flat();
  const width = Math.max(tree.width, 360);
  return svg("svg", { class: "chart beam", viewBox: `0 0 ${width.toFixed(0)} ${tree.height}`, "data-key": key,
    "aria-label": "Tree of the beam, steps from left to right, the most probable prefix at the top. Arrow keys move "
      + "along the edges and between the nodes of a step; Enter forces a prefix." },
  tree.steps.map(([node], depth) => (depth === 0 ? svg("text", { class: "axis", x: 2, y: 11 }, "step")
    : svg("text", { class: "axis step", x: Math.max(node.x + node.width / 2, 40), y: 11 }, depth))),
  nodes.filter(({ parent }) => parent).map((node) => edgeElement(node, bestIds.has(node.id))),
  nodes.map((node) => nodeElement(node, bestIds.has(node.id), isForced(node))),
  treeLegend(tree.height - 12));
}

/** Return the panel of the beam. */
export function beamPanel(context) {
  const { models, state } = context;
  const cursors = new Map();

  /** Force a path, or nothing if it is forced. */
  function force(path, model) {
    const tokens = path.map(({ token }) => token);
    const isForced = tokens.join() === state.get().prefix.join();
    state.set(isForced ? { prefix: [] }
      : { prefix: tokens, step: Math.max(0, tokens.length - 1), ...vocabularyField(models, model) });
  }

  function describeNode(node, outputs) {
    if (!node.parent) return [html("span", { class: "muted" }, "Start of the output")];
    const text = pathTo(node).map(({ symbol }) => visible(symbol)).join("");
    const at = outputs.findIndex((output) => output.node === node.id);
    const parts = [`log probability ${number(node.log_probability)}`, percent(Math.exp(node.log_probability)),
      `${STATUS[node.status]} at step ${node.depth}`,
      at >= 0 && `output ${at + 1}, score ${number(outputs[at].score, 3)}`];
    return [html("b", { class: "mono" }, text), ` ${parts.filter(Boolean).join(" · ")}`];
  }

  /** Return the figure of the tree, with its line. */
  function treeFigure({ index, model }, { outputs }, values, tree) {
    const best = outputs.length > 0 ? pathTo(tree.placed.get(outputs[0].node)) : [];
    const drawing = treeDrawing(tree, best, state.get().prefix, `beam ${index}`);
    const live = liveLine("Point at a node, or move with the arrow keys. Choose one to force its prefix.");
    const nodeAt = ({ t, s }) => tree.steps[t][s];
    const itemOf = (node) => node && { t: node.depth, s: tree.steps[node.depth].indexOf(node) };
    moveAmong(drawing, boxedItems(tree.steps), {
      cursors,
      moves: ({ t, s }) => {
        const { parent, children: [child] } = nodeAt({ t, s });
        return { ArrowLeft: itemOf(parent), ArrowRight: itemOf(child), ArrowUp: { t, s: s - 1 },
          ArrowDown: { t, s: s + 1 }, Home: { t: 0, s: 0 }, End: { t: Infinity, s: Infinity } };
      },
      show: (item) => live.show(...(item === null ? [] : describeNode(nodeAt(item), outputs))),
      choose: (item) => force(pathTo(nodeAt(item)), model),
    });
    return liveFigure(live, "Beam", drawing, pythonLines(model, "beam", values),
      "Widths of edges are the probabilities of the prefixes.");
  }

  function outputTable({ index, model }, outputs, tree) {
    const prefix = state.get().prefix.join();
    const row = ({ text, score, log_probability: logProbability, node }, i) => {
      const path = pathTo(tree.placed.get(node));
      return html("tr", {}, html("th", { scope: "row" }, i + 1),
        html("td", {}, html("button", { type: "button", class: "mono", "data-key": `output ${index} ${i}`,
          "aria-pressed": path.map(({ token }) => token).join() === prefix, "aria-label": `Force ${text || "(empty)"}`,
          onclick: () => force(path, model) }, text || "(empty)")),
        html("td", { class: "number" }, number(score, 3)), html("td", { class: "number" }, number(logProbability)),
        html("td", { class: "with-bar" }, percent(Math.exp(logProbability)), bar(Math.exp(logProbability))));
    };
    return table("Outputs of the beam", "outputs", ["", "Output", "Score", "Log probability", "Probability"],
      outputs.map(row));
  }

  /** Return a line that compares the best output with that of greedy decoding. */
  function comparison({ answer }, [best]) {
    if (!best || state.get().prefix.length > 0) return null;
    return html("p", { class: "note" }, best.text === answer.output ? "Greedy decoding finds the same output."
      : `Greedy decoding finds ${answer.output || "(empty)"}, with a log probability of `
        + `${number(answer.log_probability)}; that of the first output is ${number(best.log_probability)}.`);
  }

  return questionPanel(context, {
    id: "beam", title: "Beam", question: "beam",
    fields: numberField(state, "beamSize", "Beam size", { min: 1, max: 20 }),
    argumentsOf: ({ model }) => {
      const values = { ...state.get(), prefix: [] }; // a beam has no forced steps
      return { ...textArguments(model, values), beam_size: values.beamSize };
    },
    draw: (one, result, values) => {
      const tree = treeOf(result.nodes);
      return html("div", { class: tree.width > MAX_BESIDE ? "" : "beside" },
        treeFigure(one, result, values, tree),
        html("div", {},
          html("h4", {}, "Outputs ",
            html("span", { class: "muted" }, "by log probability per token; choose one to force it")),
          outputTable(one, result.outputs, tree), comparison(one, result.outputs)));
    },
  });
}
