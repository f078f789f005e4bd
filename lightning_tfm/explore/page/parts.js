// Heads and layers: switches, with the effects of ablations where they are known.

import { bar, clear, columns, html, number, signed } from "./dom.js";

/** Switchable kinds of components, and the kinds of changes that switch them. */
const SWITCHES = { attention: "off_heads", feed_forward: "off_components", layer: "off_components" };

/** Return the recorded increase of the loss without a part of a model, or null. */
function lossIncrease(model, part) {
  return [...model.heads, ...model.parts].find(({ name }) => name === part)?.loss_increase ?? null;
}

/** Return a change as text, with its sign; nothing for null. */
export function increaseText(value) {
  return value === null ? "" : signed(value);
}

/** Return the text of the recorded effects of the ablation of a part, or null. */
export function effects(record) {
  if (!record || record.loss_increase === null) return null;
  const direction = (value) => (value < 0 ? "falls" : "rises");
  const { loss_increase: increase, exact_match_decrease: decrease } = record;
  const loss = `the loss ${direction(increase)} by ${number(Math.abs(increase))} nats per token`;
  const exact = decrease === null || decrease === undefined ? "" : `, and the exact match ${direction(-decrease)} by `
    + `${number(100 * Math.abs(decrease), 1)} points`;
  return `${loss}${exact}`;
}

/** Return the panel of the switches of heads, feed-forward networks and layers. */
export function partsPanel({ backend, state }) {
  const element = html("div", {});

  function toggle(model, index, part, label) {
    const { off } = state.get();
    const isOn = !off.includes(part);
    const largest = Math.max(...[...model.heads, ...model.parts].map((record) => record.loss_increase ?? 0));
    const increase = lossIncrease(model, part);
    return html("button", {
      type: "button", class: "toggle", "aria-pressed": isOn, "data-key": `part ${index} ${part}`,
      "aria-label": `${part}${increase === null ? "" : `, increase of the loss without it ${number(increase)}`}`,
      title: part, onclick: () => state.set({ off: isOn ? [...off, part] : off.filter((one) => one !== part) }),
    },
    html("span", { class: isOn ? "" : "is-off" }, label),
    increase === null ? null : [bar(increase / (largest || 1), "--warm"),
      html("small", {}, increaseText(increase))]);
  }

  /** Return a component's name and its switches. */
  function row(model, index, { name, kind, heads }, layer) {
    const short = name.startsWith(`${layer}.`) ? name.slice(layer.length + 1) : name;
    const switches = [
      kind === "attention" && model.changes.includes("off_heads") ? Array.from({ length: heads }, (_, head) =>
        toggle(model, index, `${name}.${head}`, head)) : null,
      model.changes.includes("off_components") ? toggle(model, index, name, kind === "attention" ? "all"
        : state.get().off.includes(name) ? "off" : "on") : null,
    ];
    return html("div", { class: "part", role: "group", "aria-label": name },
      html("span", { class: "name" }, short), html("div", { class: "row" }, switches));
  }

  /** Return the rows of a layer, or that of a component outside of all layers. */
  function group(model, index, layer, components) {
    const isLayer = components.some(({ kind }) => kind === "layer");
    return html("div", { class: "group" },
      html("div", { class: "title" }, html("h4", { class: "mono" }, layer),
        isLayer && model.changes.includes("off_components") ? toggle(model, index, layer, "whole layer") : null),
      components.filter(({ kind }) => kind !== "layer").map((component) => row(model, index, component, layer)));
  }

  function column({ index, model }) {
    const components = model.components.filter(({ kind, switchable }) => switchable && kind in SWITCHES
      && (model.changes.includes("off_components") || model.changes.includes(SWITCHES[kind])));
    if (components.length === 0) {
      return html("p", { class: "note" }, "No part of this network can be switched off here.");
    }
    const layers = model.components.filter(({ kind }) => kind === "layer").map(({ name }) => name);
    const layerOf = ({ name }) => layers.find((layer) => `${name}.`.startsWith(`${layer}.`)) ?? name;
    const groups = [...new Set(components.map(layerOf))].map((layer) =>
      group(model, index, layer, components.filter((component) => layerOf(component) === layer)));
    const isMeasured = model.heads.length + model.parts.length > 0;
    const hint = backend.kind === "file" ? ""
      : "Run lightning-tfm inspect RUN to measure the increase of the loss without each part.";
    const effect = isMeasured ? "The bars are the increase of the loss without the part, in nats per token." : hint;
    const limit = model.changes.includes("off_components") ? "" : " Only heads can be switched off here.";
    return [html("p", { class: "note" }, `Click a part to switch it off or on.${limit} ${effect}`),
      html("div", { class: "parts" }, groups)];
  }

  return {
    id: "parts", title: "Heads and layers", element,
    update(shown) {
      clear(element, columns(shown, column));
    },
  };
}
