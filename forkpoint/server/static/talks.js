/* Conversations. store.js keeps them. */

import { contentWith } from "./pictures.js";

const LONGEST_NAME = 60;
const ROLES = ["system", "user", "assistant"];
const OWN_FIELDS = ["children", "active", "images"]; // what follows from other nodes and choices, and what is kept elsewhere

/* A tree of messages: edits and new tries are siblings, and one child of each node is the active one.
   Ids are unique across tabs, so that trees that grew in two tabs merge. */
export class Tree {
  constructor() {
    this.nodes = new Map([["root", { id: "root", children: [], active: null }]]);
    this.unsaved = new Set(); // nodes that changed here and are not stored yet
  }
  get(id) {
    return this.nodes.get(id);
  }
  add(parentId, fields) {
    const node = this.#insert({ id: newId(), parent: parentId, ...fields });
    this.get(parentId).active = node.id;
    this.unsaved.add(node);
    return node;
  }
  changed(node) {
    this.unsaved.add(node);
  }
  /* Takes over a stored node. A new sibling does not take the place of the one that is shown. */
  put(record) {
    const known = this.get(record.id);
    if (known) {
      for (const name of Object.keys(known)) if (!OWN_FIELDS.includes(name) && !(name in record)) delete known[name];
      return Object.assign(known, record);
    }
    if (!this.nodes.has(record.parent)) return null;
    const node = this.#insert(record);
    this.get(record.parent).active ??= node.id;
    return node;
  }
  #insert(fields) {
    const node = { ...fields, children: [], active: null };
    const { children } = this.get(node.parent);
    this.nodes.set(node.id, node);
    children.push(node.id);
    children.sort(); // ids begin with the time
    return node;
  }
  remove(node) {
    const parent = this.get(node.parent);
    parent.children = parent.children.filter((id) => id !== node.id);
    if (parent.active === node.id) parent.active = parent.children.at(-1) ?? null;
    this.nodes.delete(node.id);
    this.unsaved.delete(node);
  }
  siblings(node) {
    return this.get(node.parent).children;
  }
  choose(id) {
    this.get(this.get(id).parent).active = id;
  }
  /* {id: id of its active child}, and the way back. */
  choices() {
    return Object.fromEntries([...this.nodes.values()].filter((node) => node.active).map((node) => [node.id, node.active]));
  }
  applyChoices(choices) {
    for (const [id, active] of Object.entries(choices ?? {}))
      if (this.get(active)?.parent === id) this.get(id).active = active;
  }
  path() {
    const found = [];
    for (let id = this.get("root").active; id; id = this.get(id).active) found.push(this.get(id));
    return found;
  }
  pathTo(node) {
    const found = [];
    for (; node.id !== "root"; node = this.get(node.parent)) found.unshift(node);
    return found;
  }
  messagesTo(node) {
    return this.pathTo(node)
      .filter((each) => each.content || each.images?.length)
      .map(({ role, content, images }) => ({ role, content: images?.length ? contentWith(images, content) : content }));
  }
  toJSON() {
    return { nodes: [...this.nodes] };
  }
}

export class Talk {
  constructor(tree, { id = newId(), title = "" } = {}) {
    this.tree = tree;
    this.id = id;
    this.title = title;
  }
  static start(system) {
    const tree = new Tree();
    tree.add("root", { role: "system", content: system });
    return new Talk(tree);
  }
  get name() {
    const first = this.tree.path().find((node) => node.role === "user");
    const question = first?.content || (first?.pictures || first?.images ? "Image" : "");
    const line = question.trim().split("\n")[0];
    const short = line.length > LONGEST_NAME ? line.slice(0, LONGEST_NAME).trimEnd() + "…" : line;
    return this.title || short || "New conversation";
  }
  get isEmpty() {
    return this.tree.path().length < 2;
  }
  asMarkdown() {
    const names = { system: "System prompt", user: "You", assistant: "Answer" };
    const parts = this.tree
      .path()
      .filter((node) => node.content)
      .map((node) => `## ${names[node.role]}\n\n${node.content.trim()}\n`);
    return `# ${this.name}\n\n${parts.join("\n")}`;
  }
  asJSON() {
    const messages = this.tree.messagesTo(this.tree.path().at(-1));
    return JSON.stringify({ kind: "forkpoint conversation", title: this.name, messages, tree: this.tree }, null, 2);
  }
}

/* What asJSON made. Throws an Error that says what is wrong: a file may come from anywhere. */
export function readTalk(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("this is not a JSON file");
  }
  if (found?.kind !== "forkpoint conversation" || !Array.isArray(found.tree?.nodes))
    throw new Error("this is not a conversation that was exported here");
  return new Talk(importedTree(found.tree), { title: String(found.title ?? "").slice(0, 200) });
}

/* A tree as asJSON wrote it, with new ids. */
export function importedTree(saved) {
  const given = new Map(saved.nodes);
  const tree = new Tree();
  const copy = (from, to) => {
    let active = null;
    for (const id of from.children) {
      const node = given.get(id);
      given.delete(id); // each node once: a file may name them in a circle
      if (!node || !ROLES.includes(node.role) || typeof node.content !== "string" || !Array.isArray(node.children))
        throw new Error("a message of this conversation is broken");
      const { role, content, reasoning, edited, images } = node;
      const made = tree.add(to, { role, content, reasoning: String(reasoning ?? ""), edited: Boolean(edited) });
      if (role === "user" && Array.isArray(images)) Object.assign(made, withPictures(images.filter(isPicture)));
      copy(node, made.id);
      if (from.active === id) active = made.id;
    }
    if (active) tree.choose(active);
  };
  const root = given.get("root");
  if (!Array.isArray(root?.children)) throw new Error("this conversation has no beginning");
  copy(root, "root");
  if (!tree.path().length) throw new Error("this conversation is empty");
  return tree;
}

/* The fields of a message with these images. `pictures` says where they are kept; edits of the message share them. */
export function withPictures(images) {
  return images.length ? { images, pictures: { id: newId(), count: images.length } } : {};
}

function isPicture(url) {
  return typeof url === "string" && url.startsWith("data:image/");
}

let lastId = "";
/* Ids begin with the time; those that one tab makes are in the order in which it makes them. */
export function newId() {
  const time = Date.now().toString(36).padStart(9, "0");
  let id = time + Math.random().toString(36).slice(2, 8).padEnd(6, "0");
  if (id <= lastId) id = lastId + "1";
  return (lastId = id);
}

/* What is stored of a node in localStorage. Older versions of the page stored images there, too. */
export function recordOf({ children, active, ...record }) {
  if (record.pictures) delete record.images;
  return record;
}
