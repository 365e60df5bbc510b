//! Changes of an XML text that leave the rest as it is: comments, order, indentation,
//! quotes. The tree says where things are; what is changed is the text.

use std::ops::Range;

use roxmltree::Node;

/// What one level is indented by, as libvirt writes it.
const INDENT: &str = "  ";

/// An element that is to be added.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Element {
    name: String,
    attributes: Vec<(&'static str, String)>,
    content: Content,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Content {
    Text(&'static str),
    Elements(Vec<Element>),
}

impl Element {
    pub(super) fn new(name: impl Into<String>) -> Self {
        let (name, attributes) = (name.into(), Vec::new());
        Self { name, attributes, content: Content::Elements(Vec::new()) }
    }

    pub(super) fn with(mut self, key: &'static str, value: impl Into<String>) -> Self {
        self.attributes.push((key, value.into()));
        self
    }

    pub(super) fn text(mut self, text: &'static str) -> Self {
        self.content = Content::Text(text);
        self
    }

    pub(super) fn children(mut self, elements: impl IntoIterator<Item = Self>) -> Self {
        self.content = Content::Elements(elements.into_iter().collect());
        self
    }

    /// Its lines, each indented by `indent` and ended.
    fn write(&self, indent: &str, out: &mut String) {
        let Self { name, attributes, content } = self;
        let attributes: String =
            attributes.iter().map(|(key, value)| format!(" {key}='{}'", escaped(value))).collect();
        let start = format!("{indent}<{name}{attributes}");
        match content {
            Content::Text(text) => {
                out.push_str(&format!("{start}>{}</{name}>\n", escaped(text)));
            }
            Content::Elements(elements) if elements.is_empty() => {
                out.push_str(&format!("{start}/>\n"));
            }
            Content::Elements(elements) => {
                out.push_str(&format!("{start}>\n"));
                for element in elements {
                    element.write(&format!("{indent}{INDENT}"), out);
                }
                out.push_str(&format!("{indent}</{name}>\n"));
            }
        }
    }
}

/// A value as it stands between single or double quotes.
fn escaped(value: &str) -> String {
    let mut out = String::new();
    for character in value.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&apos;"),
            '"' => out.push_str("&quot;"),
            other => out.push(other),
        }
    }
    out
}

/// Changes of a text, collected.
pub(super) struct Edits<'a> {
    text: &'a str,
    changes: Vec<(Range<usize>, String)>,
}

impl<'a> Edits<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, changes: Vec::new() }
    }

    /// The text with all changes. They do not overlap: each element is changed once.
    pub(super) fn finish(mut self) -> String {
        self.changes.sort_by_key(|(range, _)| range.start);
        let mut out = String::with_capacity(self.text.len());
        let mut done = 0;
        for (range, new) in &self.changes {
            assert!(range.start >= done, "changes overlap");
            out.push_str(&self.text[done..range.start]);
            out.push_str(new);
            done = range.end;
        }
        out.push_str(&self.text[done..]);
        out
    }

    /// Sets an attribute without a namespace; behind the others if it is new.
    pub(super) fn set(&mut self, node: Node<'_, '_>, key: &str, value: &str) {
        let old = node.attributes().find(|one| one.name() == key && one.namespace().is_none());
        match old {
            Some(old) if old.value() == value => {}
            Some(old) => self.changes.push((old.range_value(), escaped(value))),
            None => self.declare(node, key, value),
        }
    }

    /// Adds an attribute, or a namespace.
    pub(super) fn declare(&mut self, node: Node<'_, '_>, key: &str, value: &str) {
        let at = self.end_of_attributes(node);
        self.changes.push((at..at, format!(" {key}='{}'", escaped(value))));
    }

    /// Sets the text of an element that has nothing else in it.
    pub(super) fn set_text(&mut self, node: Node<'_, '_>, text: &str) {
        match node.first_child() {
            Some(old) if old.text() == Some(text) => {}
            Some(old) => self.changes.push((old.range(), escaped(text))),
            None => {
                let (at, name) = (self.end_of_attributes(node), self.name(node));
                let new = format!(">{}</{name}>", escaped(text));
                self.changes.push((at..node.range().end, new));
            }
        }
    }

    /// Takes an element out, and the line that it has for itself.
    pub(super) fn remove(&mut self, node: Node<'_, '_>) {
        let mut range = node.range();
        if let Some(indent) = self.indent(node)
            && self.text[..range.start - indent.len()].ends_with('\n')
        {
            range.start -= indent.len() + 1;
        }
        self.changes.push((range, String::new()));
    }

    /// Adds elements at the end of another.
    pub(super) fn append(&mut self, node: Node<'_, '_>, elements: &[Element]) {
        if elements.is_empty() {
            return;
        }
        let indent = self.indent(node);
        let mut new = String::new();
        for element in elements {
            element.write(&format!("{}{INDENT}", indent.unwrap_or_default()), &mut new);
        }
        let range = node.range();
        let tag_end = self.end_of_attributes(node);
        let rest = &self.text[tag_end..range.end];
        if rest.trim_start().starts_with('/') {
            let name = self.name(node);
            let end = format!(">\n{new}{}</{name}>", indent.unwrap_or_default());
            self.changes.push((tag_end..range.end, end));
            return;
        }
        let end_tag = range.start
            + self.text[range.clone()].rfind("</").expect("what is not empty has an end");
        let line = self.text[..end_tag].rfind('\n').map_or(0, |at| at + 1);
        let is_alone = line > range.start && self.text[line..end_tag].trim().is_empty();
        if is_alone {
            self.changes.push((line..line, new));
        } else {
            let end = format!("\n{new}{}", indent.unwrap_or_default());
            self.changes.push((end_tag..end_tag, end));
        }
    }

    /// Adds an element behind another.
    pub(super) fn add_behind(&mut self, node: Node<'_, '_>, element: &Element) {
        let mut new = String::new();
        element.write(self.indent(node).unwrap_or_default(), &mut new);
        let at = node.range().end;
        self.changes.push((at..at, format!("\n{}", new.trim_end_matches('\n'))));
    }

    /// A tag's name as it is written.
    fn name(&self, node: Node<'_, '_>) -> &'a str {
        let text = &self.text[node.range().start + 1..];
        let end = text.find(|c: char| c.is_whitespace() || c == '/' || c == '>');
        &text[..end.unwrap_or(text.len())]
    }

    /// Behind the last attribute or namespace, before blanks and the end of the tag.
    fn end_of_attributes(&self, node: Node<'_, '_>) -> usize {
        let start = node.range().start;
        let mut quote = None;
        let mut end = start;
        for (at, byte) in self.text.bytes().enumerate().skip(start) {
            match (quote, byte) {
                (Some(open), _) if byte == open => quote = None,
                (Some(_), _) => {}
                (None, b'\'' | b'"') => quote = Some(byte),
                (None, b'>') => {
                    end = at;
                    break;
                }
                (None, _) => {}
            }
        }
        let tag = self.text[start..end].trim_end();
        let tag = tag.strip_suffix('/').unwrap_or(tag);
        start + tag.trim_end().len()
    }

    /// What stands before an element on its line; none: something else than blanks does.
    fn indent(&self, node: Node<'_, '_>) -> Option<&'a str> {
        let before = &self.text[..node.range().start];
        let line = &before[before.rfind('\n').map_or(0, |at| at + 1)..];
        line.trim().is_empty().then_some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roxmltree::Document;

    fn edited(text: &str, edit: impl Fn(&mut Edits<'_>, &Document<'_>)) -> String {
        let document = Document::parse(text).expect(text);
        let mut edits = Edits::new(text);
        edit(&mut edits, &document);
        let new = edits.finish();
        Document::parse(&new).expect(&new);
        new
    }

    fn first<'a, 'b>(document: &'a Document<'b>, name: &str) -> Node<'a, 'b> {
        document.descendants().find(|node| node.has_tag_name(name)).expect(name)
    }

    #[test]
    fn attributes_are_set_where_they_are_or_behind_the_others() {
        let set = |text: &str, value: &str| {
            edited(text, |edits, document| edits.set(first(document, "a"), "k", value))
        };
        assert_eq!(set("<a  k=\"1\" j='2' />", "3"), "<a  k=\"3\" j='2' />");
        assert_eq!(set("<a j='>/' />", "3"), "<a j='>/' k='3' />");
        assert_eq!(set("<a/>", "it's <&>"), "<a k='it&apos;s &lt;&amp;&gt;'/>");
        assert_eq!(set("<a>x</a>", "3"), "<a k='3'>x</a>");
        assert_eq!(set("<a k='3'/>", "3"), "<a k='3'/>");
        assert_eq!(set("<a xmlns:k='u'/>", "3"), "<a xmlns:k='u' k='3'/>");
    }

    #[test]
    fn texts_are_set_and_elements_removed() {
        let set = |text: &str| edited(text, |edits, doc| edits.set_text(first(doc, "a"), "<x>"));
        assert_eq!(set("<d><a k='1'>old</a></d>"), "<d><a k='1'>&lt;x&gt;</a></d>");
        assert_eq!(set("<d><a/></d>"), "<d><a>&lt;x&gt;</a></d>");
        let removed = |text: &str| edited(text, |edits, doc| edits.remove(first(doc, "a")));
        assert_eq!(removed("<d>\n  <a>\n    <b/>\n  </a>\n  <c/>\n</d>"), "<d>\n  <c/>\n</d>");
        assert_eq!(removed("<d><c/><a/></d>"), "<d><c/></d>");
    }

    #[test]
    fn elements_are_added_as_libvirt_would_write_them() {
        let new = [Element::new("x").with("k", "1"), Element::new("y").text("t")];
        let append =
            |text: &str| edited(text, |edits, document| edits.append(first(document, "a"), &new));
        assert_eq!(
            append("<d>\n  <a/>\n</d>"),
            "<d>\n  <a>\n    <x k='1'/>\n    <y>t</y>\n  </a>\n</d>"
        );
        assert_eq!(
            append("<d>\n  <a j='1'>\n    <!-- kept -->\n  </a>\n</d>"),
            "<d>\n  <a j='1'>\n    <!-- kept -->\n    <x k='1'/>\n    <y>t</y>\n  </a>\n</d>"
        );
        assert_eq!(append("<d><a></a></d>"), "<d><a>\n  <x k='1'/>\n  <y>t</y>\n</a></d>");
        let both = edited("<a/>", |edits, document| {
            edits.set(first(document, "a"), "k", "2");
            edits.append(first(document, "a"), &new[..1]);
        });
        assert_eq!(both, "<a k='2'>\n  <x k='1'/>\n</a>");
        let nested = Element::new("n").children(new.clone());
        let behind = edited("<d>\n  <a>1</a> <!-- c -->\n</d>", |edits, document| {
            edits.add_behind(first(document, "a"), &nested);
        });
        assert_eq!(
            behind,
            "<d>\n  <a>1</a>\n  <n>\n    <x k='1'/>\n    <y>t</y>\n  </n> <!-- c -->\n</d>"
        );
    }
}
