"""Server reflection of the real daemons, asked by grpcio-reflection's client (v1alpha) and by hand (v1). Everything is built in
pools of descriptors of its own: the default one has the messages of our stubs already."""
import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from conftest import inference_pb2

SERVICES = {
    "router": {"tandem.v1.Inference", "tandem.v1.Fleet"},
    "prefill": {"tandem.v1.Prefill", "tandem.v1.Worker"},
    "decode": {"tandem.v1.Decode", "tandem.v1.Worker"},
}
EVERYWHERE = {"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"}


@pytest.fixture(params=sorted(SERVICES))
def daemon(request, fleet):
    return {"router": fleet.router, "prefill": fleet.prefill[0], "decode": fleet.decode[0]}[request.param]


@pytest.fixture
def channel(daemon):
    with grpc.insecure_channel(daemon.rpc) as c:
        yield c


def test_services_are_listed(daemon, channel):
    assert set(ProtoReflectionDescriptorDatabase(channel).get_services()) == SERVICES[daemon.role] | EVERYWHERE


def test_every_service_can_be_described(daemon, channel):
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    for name in SERVICES[daemon.role] | EVERYWHERE:
        service = pool.FindServiceByName(name)
        assert service.methods
        for method in service.methods:
            assert method.input_type.full_name and method.output_type.full_name
            assert list(method.input_type.fields) is not None
    with pytest.raises(KeyError):
        pool.FindServiceByName("tandem.v1.Nothing")
    with pytest.raises(KeyError):
        pool.FindMessageTypeByName("tandem.v1.Nothing")


def test_a_client_without_our_files_can_call(daemon, channel):
    """Health by what reflection tells, as grpcurl would."""
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName("grpc.health.v1.Health").FindMethodByName("Check")
    request_class = message_factory.GetMessageClass(method.input_type)
    reply_class = message_factory.GetMessageClass(method.output_type)
    call = channel.unary_unary("/grpc.health.v1.Health/Check", request_serializer=request_class.SerializeToString,
                               response_deserializer=reply_class.FromString)
    for service in sorted({""} | SERVICES[daemon.role] | EVERYWHERE):
        assert call(request_class(service=service), timeout=20).status == 1


def test_tokenize_by_reflection_gives_what_the_stubs_give(fleet, client):
    with grpc.insecure_channel(fleet.router.rpc) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("tandem.v1.Inference").FindMethodByName("Tokenize")
        request = message_factory.GetMessageClass(method.input_type)(text="Grüße, 47 + 38".encode())
        call = channel.unary_unary("/tandem.v1.Inference/Tokenize", request_serializer=lambda m: m.SerializeToString(),
                                   response_deserializer=message_factory.GetMessageClass(method.output_type).FromString)
        ours = client.stub.Tokenize(inference_pb2.TokenizeRequest(text="Grüße, 47 + 38".encode()))
        assert list(call(request, timeout=20).token_ids) == list(ours.token_ids)


def test_v1_says_the_same_as_v1alpha(daemon, channel):
    """The v1 messages are the alpha's: only the path differs."""
    alpha = ProtoReflectionDescriptorDatabase(channel)
    pool = descriptor_pool.DescriptorPool(alpha)
    method = pool.FindServiceByName("grpc.reflection.v1.ServerReflection").FindMethodByName("ServerReflectionInfo")
    request_class = message_factory.GetMessageClass(method.input_type)
    call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                                 request_serializer=request_class.SerializeToString,
                                 response_deserializer=message_factory.GetMessageClass(method.output_type).FromString)
    symbols = sorted(SERVICES[daemon.role] | EVERYWHERE)
    questions = [request_class(list_services="")] + [request_class(file_containing_symbol=s) for s in symbols]
    answers = list(call(iter(questions), timeout=20))
    assert {s.name for s in answers[0].list_services_response.service} == set(alpha.get_services())
    for symbol, answer in zip(symbols, answers[1:], strict=True):
        files = [descriptor_pb2.FileDescriptorProto.FromString(f) for f in answer.file_descriptor_response.file_descriptor_proto]
        assert files[0] == alpha.FindFileContainingSymbol(symbol)
        assert {f.name for f in files} >= set(files[0].dependency)
